"""How long a kernel of ours, or PyTorch's own, is expected to take on a target."""

"""Real models of torchvision, timm and transformers: made small, with random weights."""

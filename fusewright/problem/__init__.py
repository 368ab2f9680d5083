"""What is optimized and checked: a problem file or a live module, and tensors to run it on."""

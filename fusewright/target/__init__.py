"""The target of compilation: the device, its features, and measured facts of GPUs."""

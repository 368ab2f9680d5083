"""The pipeline end to end: a model and an example call → a module that runs fused kernels."""

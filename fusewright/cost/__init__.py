"""The expected time of a kernel, ours or PyTorch's, on a target.

Every coefficient was fitted on one GPU (`target.facts.FITTED_ON`); its comment names the
measurement. For other GPUs, rates scale with SMs and clock, and with memory bandwidth.
"""

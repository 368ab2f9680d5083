"""A GPU's architecture and capabilities, decided here for the package and for emitted files."""


def _fw_has_tensor_cores(major: int, minor: int) -> bool:
    """Whether a GPU of this compute capability runs our matmuls and convolutions: Hopper does."""
    return (major, minor) == (9, 0)


def _fw_architecture(major: int, minor: int) -> str:
    """The GPU as nvcc names it, such as sm_80."""
    if major < 8:
        raise RuntimeError(
            f"the kernels need a GPU of compute capability 8.0 or later, not {major}.{minor}"
        )
    # wgmma and TMA need the suffix. Such code runs on no other GPU, and no other kernel needs it.
    return f"sm_{major}{minor}{'a' if _fw_has_tensor_cores(major, minor) else ''}"

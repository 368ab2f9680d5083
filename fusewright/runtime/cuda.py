"""How an emitted file compiles CUDA kernels: PyTorch's `cpp_extension.load`, without its headers.

Not `load_inline`, which makes one file of all sources: one compiler would have all the work.
"""

import importlib
import os
import pathlib
import re
import shutil
import subprocess
import typing

import torch

from fusewright.runtime.gpu import _fw_architecture
from fusewright.runtime.library import _fw_cores, _fw_divided


def _fw_flags() -> list[str]:
    """nvcc's flags for the current device."""
    arch = _fw_architecture(*torch.cuda.get_device_capability())
    # PyTorch disables the operators of 16-bit types for its own headers, which we do not include.
    half = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    target = ["-gencode", f"arch={arch.replace('sm', 'compute')},code={arch}"]
    # -O concerns host code only: kernels are always fully optimized.
    flags = ["-std=c++17", "-O1", "-fmad=false", *target]
    return flags + [f"-U__CUDA_NO_{name}__" for name in half]


def _fw_recipe() -> list[str]:
    return [*_fw_flags(), torch.__version__, str(torch.version.cuda)]


def _fw_on_cores(cores: int, home: str | None) -> list[str]:
    """The flag that lets nvcc use so many cores, if it is new enough; the code stays the same."""
    nvcc = os.environ.get("PYTORCH_NVCC", f"{home}/bin/nvcc")
    if shutil.which(nvcc) is None:
        return []
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    new = found is not None and (int(found[1]), int(found[2])) >= (12, 6)
    return [f"--split-compile={cores}"] if new and cores > 1 else []


def _fw_build(text: str, name: str, folder: pathlib.Path) -> None:
    """Compile into `folder`."""
    # Imported here: it takes 0.2 s, and most calls find a library that was built before.
    extensions: typing.Any = importlib.import_module("torch.utils.cpp_extension")
    sources = _fw_divided(text, folder, ".cu")
    each = _fw_cores() // len(sources)
    extensions.load(
        name=name,
        sources=sources,
        extra_cuda_cflags=_fw_flags() + _fw_on_cores(each, extensions.CUDA_HOME),
        build_directory=str(folder),
        is_python_module=False,
    )

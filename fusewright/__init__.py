"""Fusewright: PyTorch models as fused, checked CUDA C++ and host C++ kernels.

`optimize(model, example_inputs)` gives back a module that runs faster and is otherwise the same;
`python -m fusewright optimize PROBLEM.py` writes a standalone file that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusewright.compile.explain import explain
    from fusewright.compile.parts import optimize_parts
    from fusewright.compile.save import save
    from fusewright.compile.solution import optimize

__version__ = "0.1.0"
__all__ = ["explain", "optimize", "optimize_parts", "save"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; the command line's errors and help should not wait for it.
    if name == "optimize":
        from fusewright.compile.solution import optimize

        return optimize
    if name == "optimize_parts":
        from fusewright.compile.parts import optimize_parts

        return optimize_parts
    if name == "explain":
        from fusewright.compile.explain import explain

        return explain
    if name == "save":
        from fusewright.compile.save import save

        return save
    raise AttributeError(f"module 'fusewright' has no attribute {name!r}")

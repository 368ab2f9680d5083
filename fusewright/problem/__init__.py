"""Problem files, and the tensors to run their models on."""

from fusewright.problem.load import load_problem

__all__ = ["load_problem"]

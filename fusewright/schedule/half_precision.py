"""Values of a loop that reach memory only after rounding to a 16-bit type.

Their last float32 digits are lost there, so on a GPU their exponentials and quotients need not be
exact to the last digit. Between them and memory are only steps that preserve a relative error:
products, quotients, and sums of exponentials, which are positive. The logarithm of such a sum turns
its relative error into an absolute one, no larger than the rounding when it is added.
"""

from __future__ import annotations

from fusewright.ir.graph import HALF_DTYPES
from fusewright.ir.loop import Apply, Instruction, LoopKernel, Reduce, Store, reads


def half_precision_values(kernel: LoopKernel) -> frozenset[str]:
    """The names of those values."""
    uses: dict[str, list[Instruction]] = {}
    for item in kernel.body:
        for name in reads(item):
            uses.setdefault(name, []).append(item)
    made = {item.name: item for item in kernel.body if isinstance(item, Apply)}
    found: set[str] = set()
    for item in reversed(kernel.body):
        if isinstance(item, Apply | Reduce) and item.name in uses:
            exponential = item.name in made and made[item.name].op == "exp"
            if all(_loses_digits(use, found, uses, exponential) for use in uses[item.name]):
                found.add(item.name)
    return frozenset(found)


def _loses_digits(
    use: Instruction, found: set[str], uses: dict[str, list[Instruction]], exponential: bool
) -> bool:
    """Whether the result of this use is stored in 16 bits and has no other use."""
    match use:
        case Store():
            return use.dtype in HALF_DTYPES
        case Apply(op="cast"):
            stored = all(isinstance(each, Store) for each in uses.get(use.name, ()))
            return use.dtype in HALF_DTYPES and stored and use.name in found
        case Apply(op="mul" | "div"):
            return use.name in found
        case Reduce(kind="sum") if exponential:
            return use.name in found or _ends_in_logarithms(use.name, found, uses)
    return False


def _ends_in_logarithms(name: str, found: set[str], uses: dict[str, list[Instruction]]) -> bool:
    """Whether a sum is used only through its logarithm, added to something or alone."""
    made = uses.get(name, [])
    logs = [use.name for use in made if isinstance(use, Apply) and use.op == "log"]
    ends = [use for log in logs for use in uses.get(log, [])]
    added = [use.name for use in ends if isinstance(use, Apply) and use.op in ("add", "sub")]
    ended = all(log in found for log in logs) or len(added) == len(ends)
    return bool(made) and len(logs) == len(made) and ended and found.issuperset(added)

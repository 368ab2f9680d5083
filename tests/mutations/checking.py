"""Bugs in what decides whether a candidate is right: `verify` and `judge`."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_VERIFY = "fusewright/verify"
_JUDGE = "fusewright/judge"

CHECKING = (
    Mutation(
        "nan-passes",
        f"{_VERIFY}/figures.py",
        "kinds = value.isnan().to(torch.int8)",
        "kinds = torch.zeros_like(value, dtype=torch.int8)",
        "NaN where eager has a number is no error",
        ("tests/verify/test_looks.py", "tests/verify/test_core.py", "tests/verify"),
    ),
    Mutation(
        "sign-of-infinity",
        f"{_VERIFY}/figures.py",
        "return kinds + 2 * value.isposinf().to(torch.int8) + 3 * value.isneginf().to(torch.int8)",
        "return kinds + 2 * value.isinf().to(torch.int8)",
        "an infinity of the other sign is no error",
        ("tests/verify/test_figures.py", "tests/verify/test_core.py", "tests/verify"),
    ),
    Mutation(
        "second-chunk",
        f"{_VERIFY}/figures.py",
        "            self.misplaced or other.misplaced,\n",
        "            self.misplaced,\n",
        "NaN counts in the first chunk of a large result only",
        ("tests/verify/test_figures.py",),
    ),
    Mutation(
        "single-element",
        f"{_VERIFY}/compare.py",
        "if check.ok and mine.largest > limit:",
        "if check.ok and mine.largest > limit * len(check.name) * 1e6:",
        "a single wrong element among many is within the bound",
        ("tests/verify/test_core.py -k single",),
    ),
    Mutation(
        "all-zero",
        f"{_VERIFY}/compare.py",
        "return _exact(name, not bool(ours.any()), \"eager returns none\")",
        "return _exact(name, True, \"eager returns none\")",
        "a gradient that eager does not have passes whatever it is",
        ("tests/verify/test_core.py", "tests/verify/test_verify.py"),
    ),
    Mutation(
        "other-dtype",
        f"{_VERIFY}/compare.py",
        "if ours.dtype != eager.dtype:",
        "if ours.is_floating_point() != eager.is_floating_point():",
        "a result of another precision passes",
        ("tests/verify/test_verify.py", "tests/verify/test_core.py", "tests/judge"),
    ),
    Mutation(
        "looks-alone",
        f"{_VERIFY}/compare.py",
        "if few and len(right) > len(wrong):",
        "if few or len(right) > len(wrong):",
        "a gradient that is wrong in most looks passes if few elements are",
        ("tests/verify/test_looks.py",),
    ),
    Mutation(
        "slices",
        f"{_JUDGE}/slices.py",
        "share = _OF_EAGERS_WORST * (max(shares) + least)",
        "share = 1.0 + _OF_EAGERS_WORST * (max(shares) + least)",
        "a row or a channel that is zero hides in the whole",
        ("tests/judge/test_messages.py -k 'part or slice'",),
    ),
    Mutation(
        "guard-zones",
        f"{_JUDGE}/guarded.py",
        "both = (self._bytes[: self._start], self._bytes[ends:])",
        "both = (self._bytes[: self._start],)",
        "a kernel may write behind its tensors",
        ("tests/judge/test_messages.py -k guards",),
    ),
    Mutation(
        "written-weights",
        f"{_JUDGE}/findings.py",
        'if "weights" in header and header["weights"] != weights:',
        'if "weights" in header and not header["weights"]:',
        "a call may change the parameters",
        ("tests/judge/test_candidates.py -k 'writes_weights'",),
    ),
    Mutation(
        "reused-memory",
        f"{_JUDGE}/findings.py",
        'if "tensor" in node and old[node["tensor"]] != new[later[name]["tensor"]]:',
        'if "tensor" in node and old[node["tensor"]] is None:',
        "an earlier result may change after its call",
        ("tests/judge/test_candidates.py -k 'one_workspace'",),
    ),
    Mutation(
        "below-the-floor",
        f"{_JUDGE}/race.py",
        "if mine.high_us >= found.floor_us or found.rounds < _ENOUGH_ROUNDS:",
        "if mine.high_us >= 0 or found.rounds < _ENOUGH_ROUNDS:",
        "a time that no machine can reach is believed",
        ("tests/judge/test_times.py -k floor",),
    ),
)  # fmt: skip

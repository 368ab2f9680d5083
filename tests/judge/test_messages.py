"""Messages, guard zones, slices and verdicts: the parts that the judge trusts."""

from __future__ import annotations

import builtins
import copy
import json
import random
import struct
import sys

import pytest
import torch

from fusewright.judge.classes import Classes
from fusewright.judge.findings import readable
from fusewright.judge.guarded import Guarded
from fusewright.judge.operators import operators_of, replaces_nothing
from fusewright.judge.script import script
from fusewright.judge.slices import check_slices
from fusewright.judge.verdict import EXIT_CODES, Fault, escaped, gravest
from fusewright.judge.watch import function_watch
from fusewright.judge.wire import (
    BadMessage,
    Unpacker,
    bytes_of,
    decoded,
    encoded,
    named_leaves,
    outline,
    packed,
    tensor_of,
)
from fusewright.verify.compare import Check


def unpacked(raw: bytes, most: int = 1 << 20) -> tuple[dict[str, object], list[bytes]]:
    unpacker = Unpacker(most)
    for start in range(0, len(raw), 7):
        unpacker.feed(raw[start : start + 7])
    assert unpacker.is_complete
    return unpacker.message()


def test_a_message_arrives_in_parts() -> None:
    blobs = [b"abc", b"", b"0123456789"]
    header, found = unpacked(packed({"nonce": "n"}, blobs) + b"".join(blobs))
    assert header["nonce"] == "n" and found == blobs


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (packed({}, []) + b"more", "more bytes"),
        (b"\xff" * 16, "does not begin"),
        (struct.pack("<Q", 3) + b"{}}", "cannot be read"),
        (packed({}, []).replace(b"[]", b"-1"), "cannot be read"),
        (struct.pack("<Q", 17) + b'{"blobs":[1e999]}', "cannot be read"),
        (struct.pack("<Q", 16) + json.dumps({"blobs": [10**9]}).encode()[:16], "cannot be read"),
    ],
)
def test_forged_messages_are_refused(raw: bytes, words: str) -> None:
    with pytest.raises(BadMessage, match=words):
        unpacked(raw)


def test_a_forged_infinity_is_a_bad_message() -> None:
    with pytest.raises(BadMessage), readable():
        int(json.loads("1e999"))


def test_a_gradient_has_the_class_of_most_calls() -> None:
    """One fine call does not make coarse ones fine, nor one coarse call near a kink the others."""
    classes, limits = Classes(), {"fp32": 1e-6}
    for pair in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("bf16", "fp32")):
        for name, precision in zip(("grad x", "grad w"), pair, strict=True):
            checked = Check(name, 0.0, 0.0, 0.0, True, limits=limits, precision=precision)
            classes.note([checked])
    assert classes.by_pass()["train"] == "bf16"
    classes = Classes()
    classes.note([Check("grad w", 0.0, 0.0, 0.0, True, limits=limits, precision="fp32")] * 3)
    classes.note([Check("grad w", 0.0, 0.0, 0.0, True, limits=limits, precision="bf16")])
    assert classes.by_pass()["train"] == "fp32"


def test_an_answer_of_any_size_is_refused() -> None:
    unpacker = Unpacker(100)
    with pytest.raises(BadMessage, match="larger"):
        unpacker.feed(packed({"nonce": "n"}, [b"x" * 101]))


def test_tensors_and_trees_survive_the_way() -> None:
    tree = [torch.randn(3, 2).t(), {"a": (1, None, "x")}, torch.tensor([True, False]), 2.5]
    sent: list[bytes] = []

    def send(tensor: torch.Tensor) -> dict[str, object]:
        sent.append(bytes_of(tensor))
        kind = str(tensor.dtype).removeprefix("torch.")
        return {"tensor": len(sent) - 1, "dtype": kind, "shape": list(tensor.shape)}

    node = json.loads(json.dumps(encoded(tree, send)))
    found = decoded(node, lambda n: tensor_of(sent[n["tensor"]], n["dtype"], n["shape"]))
    assert isinstance(found, list) and torch.equal(found[0], tree[0])  # type: ignore[arg-type]
    assert found[1] == tree[1] and torch.equal(found[2], tree[2])  # type: ignore[arg-type]
    assert outline(node) == "list(tensor, dict(a: tuple(int, None, str)), tensor, float)"
    assert [name for name, _ in named_leaves("y", node)][1] == "y[1]['a'][0]"


def test_a_tensor_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(BadMessage, match="no float32 tensor"):
        tensor_of(b"1234", "float32", [2])
    with pytest.raises(BadMessage, match="data type"):
        tensor_of(b"1234", "nonsense", [1])


def test_a_subclass_is_named_and_not_sent() -> None:
    class Lazy(torch.Tensor):
        pass

    node = encoded(torch.ones(2).as_subclass(Lazy), lambda tensor: {"tensor": 0})
    assert node["subclass"] and node["other"].endswith("Lazy")


@pytest.mark.parametrize("stride", [(5, 1), (1, 4), (0, 1)])
def test_guards_show_writes_and_poison_reads(stride: tuple[int, int]) -> None:
    guarded = Guarded((torch.float32, (4, 5), stride))
    values = torch.arange(5.0).expand(4, 5) if stride[0] == 0 else torch.randn(4, 5)
    guarded.write(values)
    tensor = guarded.view()
    assert torch.equal(tensor, values) and tensor.stride() == stride
    assert guarded.is_intact and tensor.data_ptr() % 64 == 0
    behind = torch.as_strided(tensor, (1,), (1,), tensor.storage_offset() + 20)
    assert bool(behind.isnan().all())
    behind.zero_()
    assert not guarded.is_intact


def test_new_values_do_not_show_in_the_version() -> None:
    guarded = Guarded((torch.float32, (3,), (1,)))
    guarded.write(torch.zeros(3))
    tensor = guarded.view()
    version = tensor._version
    guarded.write(torch.ones(3))
    assert tensor._version == version and guarded.view()._version == version
    assert torch.equal(tensor, torch.ones(3))


def test_a_small_part_does_not_hide() -> None:
    """A row of 1e-4 times the usual size is all wrong, and no single deviation stands out."""
    truth = torch.randn(64, 32, dtype=torch.float64)
    truth[7] *= 1e-4
    eager = truth.float()
    ours = eager.clone()
    assert (check_slices("y", ours, eager, truth) or pytest.fail()).ok
    ours[7] = 0.0
    found = check_slices("y", ours, eager, truth)
    assert found is not None and not found.ok and found.name == "y, slice 7 of dimension 0"
    assert found.error == pytest.approx(1.0)


def test_a_slice_may_be_as_inexact_as_eagers_worst() -> None:
    truth = torch.randn(16, 8, dtype=torch.float64)
    eager = (truth * (1 + 1e-4 * torch.randn(16, 1))).float()
    ours = (truth * (1 + 1e-4 * torch.randn(16, 1))).float()
    found = check_slices("y", ours, eager, truth)
    assert found is not None and found.ok and 1e-6 < found.error < 1e-2


def test_without_float64_a_slice_is_about_as_near_as_the_whole() -> None:
    eager = torch.randn(16, 8)
    ours = eager * (1 + 0.01 * torch.randn(16, 1))
    for allowed, ok in ((0.0, False), (0.005, False), (0.05, True)):
        found = check_slices("y", ours, eager, None, (), allowed)
        assert found is not None and found.ok == ok


def test_scripts_differ_and_ask_everything() -> None:
    scripts = [script(random.Random(seed)) for seed in range(8)]
    assert len({len(each) for each in scripts}) > 3
    kinds = [{(step.name, step.mode, step.gradients) for step in each} for each in scripts]
    assert all(each == kinds[0] for each in kinds) and len(kinds[0]) > 25
    orders = {tuple(step.label for step in each[:12]) for each in scripts}
    assert len(orders) == len(scripts)
    assert all(step.mode == "eval" for step in script(random.Random(1), ("eval",)))


def test_replaced_functions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = function_watch()
    assert replaced() == []
    monkeypatch.setattr(torch, "allclose", lambda *args: True)
    monkeypatch.setattr(torch.Tensor, "norm", lambda *args: 0)
    assert replaced() == ["torch.allclose", "Tensor.norm"]
    monkeypatch.undo()
    assert replaced() == []


def test_what_others_copy_add_and_import_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = function_watch()
    monkeypatch.setattr(torch.Tensor, "__add__", lambda *args: 0)
    monkeypatch.setattr(torch.nn.Module, "__setattr__", torch.nn.Module.__setattr__.__call__)
    monkeypatch.setattr(torch.autograd.Function, "apply", lambda *args: 0)
    monkeypatch.setattr(copy, "deepcopy", lambda each: each)
    monkeypatch.setattr(builtins, "abs", lambda each: each)
    monkeypatch.setitem(sys.modules, "torch.testing", builtins)
    found = replaced()
    monkeypatch.undo()
    assert sorted(found) == [
        "Function.apply",
        "Module.__setattr__",
        "Tensor.__add__",
        "builtins.abs",
        "copy.deepcopy",
        "torch.testing",
    ]
    assert replaced() == []


def test_output_cannot_move_the_cursor() -> None:
    shown = escaped(b"ok\x1b[2J\rall \xff\n", cut=True)
    assert shown == "ok\\x1b[2J\\rall \\xff\n\n… (more was printed)"


def test_the_gravest_fault_is_told() -> None:
    faults = [Fault("wrong", "a"), Fault("unsafe", "b"), Fault("dishonest", "c")]
    assert gravest(faults).reason == "c" and gravest(faults[:2]).reason == "b"
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES) and 2 not in EXIT_CODES.values()


def test_a_file_that_replaces_no_operator() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    eager = operators_of(lambda: torch.tanh(torch.nn.functional.linear(x, weight)) * 2)
    assert eager["tanh"] == eager["mul"] == 1
    same = operators_of(lambda: torch.tanh(torch.nn.functional.linear(x, weight)) * 2 + 0)
    fused = operators_of(lambda: torch.nn.functional.linear(x, weight))
    assert replaces_nothing(same, eager) and not replaces_nothing(fused, eager)
    assert not replaces_nothing(same, {}), "a model without operators has nothing to replace"

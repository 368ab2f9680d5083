"""What a GPU is, and what it can do: the library and emitted files say the same of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewright import build
from fusewright.emit.support import pasted
from fusewright.errors import DeviceError, FusewrightError
from fusewright.runtime import BUILDERS, PASTED, TENSOR_CORES
from fusewright.target.device import architecture, target_of
from fusewright.target.facts import H200
from fusewright.target.target import Target

GPU = torch.device("cuda", 0)
ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}


def installed(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **facts: Any) -> None:
    """As if PyTorch found such a GPU."""
    found = {
        "name": "a GPU",
        "multi_processor_count": 114,
        "shared_memory_per_multiprocessor": 100 << 10,
        "major": capability[0],
        "minor": capability[1],
    }
    properties = SimpleNamespace(**found | facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


@pytest.fixture(scope="module")
def emitted() -> dict[str, Any]:
    """The names that the run time of an emitted file has for a GPU."""
    modules = (*PASTED, TENSOR_CORES, *BUILDERS["cuda"])
    imports, definitions = pasted(modules, "_fw_flags _fw_tensor_cores")
    names: dict[str, Any] = {"__name__": "emitted"}
    exec("\n".join([*imports, *definitions]), names)
    return names


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=str)
def test_library_and_emitted_file_agree(
    capability: tuple[int, int], emitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, capability)
    wanted = ARCHITECTURES[capability]
    assert architecture(GPU) == wanted
    flags = build._flags("cuda", wanted)
    option = flags[flags.index("-gencode") + 1]
    assert option == f"arch={wanted.replace('sm', 'compute')},code={wanted}"
    assert option in emitted["_fw_flags"]()
    emitted["_FW_CORES"].clear()
    hopper = capability == (9, 0)
    assert target_of(GPU).tensor_cores is emitted["_fw_tensor_cores"](0) is hopper


def test_both_refuse_a_gpu_that_is_too_old(
    emitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, (7, 5))
    words = r"capability 8\.0 or later, not 7\.5"
    with pytest.raises(DeviceError, match=words):
        architecture(GPU)
    with pytest.raises(RuntimeError, match=words):
        emitted["_fw_flags"]()


def test_the_driver_says_how_many_processors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, (9, 0))
    target = target_of(GPU)
    assert (target.sms, target.shared_bytes) == (114, 100 << 10)
    assert target.facts.cycles_per_us == H200.cycles_per_us, "measured on no other GPU"
    assert target_of(torch.device("cpu")) == Target.host() and Target.host().sms == 1


def test_trials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, (9, 0))
    monkeypatch.setenv("FUSEWRIGHT_TRY", "fused_reductions")
    assert target_of(GPU).fused_reductions and not target_of(GPU).half_matmuls
    monkeypatch.setenv("FUSEWRIGHT_TRY", "fused_reductions,fused_redaction")
    with pytest.raises(FusewrightError, match="fused_redaction"):
        target_of(GPU)

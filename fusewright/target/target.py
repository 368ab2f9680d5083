"""`Target`: what we compile for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fusewright.target.facts import H200, Gpu

SHARED_BYTES = 48 * 1024
TRIALS = ("half_matmuls", "fused_reductions")


@dataclass(frozen=True)
class Target:
    """The language, 'cuda' or 'host', the facts of the GPU if there is one, and its features.

    `tensor_cores`: whether it has Hopper's, for which our matmuls and convolutions are written.
    `tf32`: whether PyTorch may round the operands of matmuls. `conv_tf32`: whether it may round
    those of convolutions; ours then stage their input in fp16, and may compute it in a prologue.
    `transposing`: whether loops may transpose tiles in shared memory, so that PyTorch's
    convolutions can run in channels-last.

    Off until they are measured (TRIALS): `half_matmuls`, whether 16-bit matmuls are ours;
    `fused_reductions`, whether our convolutions also reduce their results, and whether they and our
    matmuls end in a logsumexp.
    """

    language: str
    gpu: Gpu | None = None
    tensor_cores: bool = False
    tf32: bool = False
    transposing: bool = False
    half_matmuls: bool = False
    fused_reductions: bool = False
    conv_tf32: bool = False

    @property
    def facts(self) -> Gpu:
        """The GPU's facts. Costs exist for GPUs only."""
        assert self.gpu is not None, "a host target has no GPU facts"
        return self.gpu

    @property
    def sms(self) -> int:
        """The number of SMs. The host counts as one."""
        return self.gpu.sms if self.gpu else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of an SM."""
        return self.gpu.shared_bytes if self.gpu else 0

    @property
    def clusters(self) -> bool:
        """Whether blocks may form clusters, which can read each other's shared memory."""
        return self.tensor_cores

    @property
    def online(self) -> bool:
        """Whether loops compute more in one sweep, or hold columns in registers, to read memory
        once."""
        return self.language == "cuda"

    @staticmethod
    def host() -> Target:
        return Target("host")

    @staticmethod
    def cuda(
        gpu: Gpu = H200,
        tensor_cores: bool = True,
        trials: Collection[str] = (),
        tf32: bool = False,
        conv_tf32: bool = True,
    ) -> Target:
        """For this GPU. One that was not measured has the H200's record with its own counts."""
        return Target(
            "cuda",
            gpu,
            tensor_cores=tensor_cores,
            tf32=tf32,
            conv_tf32=conv_tf32,
            transposing=True,
            **{each: each in trials for each in TRIALS},
        )

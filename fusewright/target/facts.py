"""Facts of each GPU that was measured. Coefficients fitted to measurements are in `cost`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Facts of one GPU. Rates are the hardware's limits, which no kernel quite reaches."""

    name: str
    sms: int
    cycles_per_us: float  # at the highest clock of the SMs
    memory_bytes_per_us: float
    l2_bytes_per_us: float
    shared_bytes: int  # of one SM

    @property
    def relative_compute(self) -> float:
        """SMs times clock, relative to the GPU on which the costs were fitted."""
        return self.sms * self.cycles_per_us / (FITTED_ON.sms * FITTED_ON.cycles_per_us)

    @property
    def relative_memory(self) -> float:
        """The rate of the memory, relative to that GPU's."""
        return self.memory_bytes_per_us / FITTED_ON.memory_bytes_per_us


# SMs, memory and shared memory are from the data sheet. The clock is from nvidia-smi; in long
# matmuls the power limit lowers it to about 1500 MHz. A copy by PyTorch reaches 4.17e6 bytes per
# µs. The rate of the L2 cache is the highest at which our convolutions read it (25 shapes).
H200 = Gpu(
    name="NVIDIA H200",
    sms=132,
    cycles_per_us=1980.0,
    memory_bytes_per_us=4.8e6,
    l2_bytes_per_us=6.5e6,
    shared_bytes=228 * 1024,
)
FITTED_ON = H200

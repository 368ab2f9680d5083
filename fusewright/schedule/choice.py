"""How one loop kernel is laid over the machine: `Schedule`."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_TILE = 64
HOST_RUN = 1024  # kLongestRun of kernels/host/loops.hpp


@dataclass(frozen=True)
class Schedule:
    """kind: 'pointwise', 'row' (lanes along the last inner axis) or 'column' (last outer axis);
    'transpose' and 'transpose_row' are the first two by tiles, turned in shared memory; 'scan' and
    'scan_column' walk along rows and columns.

    lanes: elements per vector (host: lanes of an accumulator). threads: of a CUDA block (of a row
    for 'row', where `rows` share a block; `across` of a column block lie along the columns).
    unroll: vectors in flight per thread. cached: the row stays in registers, or its first `unroll`
    vectors of each thread do, and each sweep reads the others again, `beyond` in flight. shared: a
    cached row waits in shared memory instead, as it lies in memory, and each sweep computes anew
    from it; so many blocks share a processor. splits: parts of the inner extent that are reduced
    apart and joined in order. tile: the edge of a tile. wide: vectors are there for offsets of 64
    bits too, for which there are single elements otherwise.
    """

    kind: str
    lanes: int = 1
    threads: int = 256
    rows: int = 1
    across: int = 32
    unroll: int = 1
    cached: bool = False
    beyond: int = 0
    shared: int = 0
    splits: int = 1
    tile: int = LARGE_TILE
    wide: bool = False

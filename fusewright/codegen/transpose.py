"""The parts of a functor that move tensors through shared memory (see kernels/cuda/transpose.cuh).

`fetch` reads V neighbours along the transposed axis, and `stage` writes them to the tile. `visit`
reads and writes the tile with its lanes along the last axis. `flush` writes the tile to memory.
Held columns (kernels/cuda/transpose_column.cuh) stage stores only; m is the index in a column.
"""

from __future__ import annotations

from fusewright.codegen.access import tile_lanes
from fusewright.codegen.form import Form, all_coordinates, decompose, offset_text
from fusewright.codegen.lanes import function_lines, lane_loop, used
from fusewright.codegen.members import struct
from fusewright.ir.loop import Load, Store
from fusewright.ir.operators import STORAGE_TYPES
from fusewright.schedule.transpose_tiles import slot_bytes, tile_count


def tile_parts(form: Form) -> list[list[str]]:
    loads = [item for item in form.tiles if isinstance(item, Load)]
    stores = [item for item in form.tiles if isinstance(item, Store)]
    fetches, flushes = (str(bool(each)).lower() for each in (loads, stores))
    tiles, slot = tile_count(form.tiles), slot_bytes(form.tiles)
    flags = [
        f"static constexpr bool kFetches = {fetches}, kFlushes = {flushes};",
        f"static constexpr int kTiles = {tiles}, kSlotBytes = {slot};",
    ]
    if form.schedule.kind == "transpose_column":
        return [flags, _flush(form, stores)]
    moves = [_fetched(form, loads), _fetch(form, loads), _stage(form, loads), _flush(form, stores)]
    return [
        ["template <int V>", "struct Row;"] * (form.transposed_inner is not None) + flags,
        *moves,
    ]


def _indices(form: Form) -> str:
    if form.transposed_inner is not None:
        return "const Row<1>& row, I q, I m, I l"
    return "I p, I m, I q, I l" if form.is_row else "I q, I m, I l"


def _coordinates(form: Form) -> list[str]:
    return all_coordinates(form, "row." if form.transposed_inner is not None else "")


def _heads(form: Form, lines: list[str]) -> list[str]:
    """Definitions of the coordinates. The V neighbours begin at m along the transposed axis."""
    kernel = form.kernel
    if form.schedule.kind == "transpose_column":
        column = decompose(form, kernel.outer, "i", "l")
        return used([*column, *decompose(form, kernel.inner, "j", index="m")], lines)
    if form.transposed_inner is not None:
        return used(decompose(form, kernel.inner, "j", "l", form.transposed_inner), lines)
    if not form.is_row:
        return used(decompose(form, kernel.outer, "i", "l", form.transposed), lines)
    outer = decompose(form, kernel.outer, "i", "m", index="p")
    return used(outer + decompose(form, kernel.inner, "j", "l"), lines)


def _fetched(form: Form, loads: list[Load]) -> list[str]:
    fields = [(f"fw::Unit<{STORAGE_TYPES[x.dtype]}, V>", form.names[x.name]) for x in loads]
    return struct("Fetched", fields)


def _fetch(form: Form, loads: list[Load]) -> list[str]:
    at = _coordinates(form)
    lines = []
    for item in loads:
        where = f"{form.pointers[item.access.buffer]} + ({offset_text(form, item.access, at)})"
        lines.append(f"fetched.{form.names[item.name]}.read({where});")
    signature = f"fetch(Fetched<V>& fetched, {_indices(form)})"
    return function_lines("int V", signature, _heads(form, lines) + lines)


def _stage(form: Form, loads: list[Load]) -> list[str]:
    heads, keeps = [], []
    for item in loads:
        name = form.names[item.name]
        heads.append(f"const auto {name}_tile = {tile_lanes(form, item)};")
        keeps.append(f"{name}_tile.keep(v, fetched.{name}.pack.lanes[v]);")
    signature = "stage(const Fetched<V>& fetched, const Tile& tile)"
    return function_lines("int V, class Tile", signature, heads + lane_loop(keeps))


def _flush(form: Form, stores: list[Store]) -> list[str]:
    at = _coordinates(form)
    heads, moves, writes = [], [], []
    for number, item in enumerate(stores):
        offset = offset_text(form, item.access, at)
        pointer, storage = form.pointers[item.access.buffer], STORAGE_TYPES[item.dtype]
        heads.append(f"fw::UnitOut<{storage}, V> out_{number}({pointer}, {offset});")
        moves.append(f"out_{number}.pack.lanes[v] = {tile_lanes(form, item)}[v];")
        writes.append(f"out_{number}.write();")
    lines = [*heads, *lane_loop(moves), *writes]
    signature = f"flush(const Tile& tile, {_indices(form)})"
    return function_lines("int V, class Tile", signature, _heads(form, lines) + lines)

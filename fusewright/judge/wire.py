"""Messages between the judge and the candidate's process.

A message is a JSON header and raw bytes; nothing is pickled. Trees of tensors become JSON nodes
that name their tensors by the number of a blob. Both sides use the same functions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Node = dict[str, Any]

_SIZE = struct.Struct("<Q")
# A header describes tensors and never holds their values.
MOST_HEADER_BYTES = 1 << 26
# The name of all results of earlier calls, where a result shares their memory.
EARLIER = "the result of an earlier call"
_TENSORS_OWN = frozenset(dir(Tensor))
_PLAIN = (bool, int, float, str)
_DTYPES = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype)
}


class BadMessage(Exception):
    """The bytes are no message of ours."""


def packed(header: Node, blobs: Sequence[bytes]) -> bytes:
    """A message as bytes, without its blobs: the length of the header, and the header."""
    text = json.dumps({**header, "blobs": [len(each) for each in blobs]}).encode()
    return _SIZE.pack(len(text)) + text


class Unpacker:
    """Takes the bytes of one message as they arrive."""

    def __init__(self, most_bytes: int) -> None:
        self.header: Node | None = None
        self.most_bytes = most_bytes
        self._buffer = bytearray()
        self._sizes: list[int] = []

    def feed(self, part: bytes) -> None:
        self._buffer += part
        if len(self._buffer) > self.most_bytes + MOST_HEADER_BYTES:
            raise BadMessage("the answer is far larger than any right one")
        if self.header is None and len(self._buffer) >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._buffer)
            if size > MOST_HEADER_BYTES:
                raise BadMessage("the answer does not begin like one")
            if len(self._buffer) >= _SIZE.size + size:
                self._begin(bytes(self._buffer[_SIZE.size : _SIZE.size + size]))
                del self._buffer[: _SIZE.size + size]

    def _begin(self, text: bytes) -> None:
        try:
            header = json.loads(text)
            self._sizes = [int(each) for each in header["blobs"]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise BadMessage("the header of the answer cannot be read") from error
        if min(self._sizes, default=0) < 0 or sum(self._sizes) > self.most_bytes:
            raise BadMessage("the answer is far larger than any right one")
        self.header = header

    @property
    def is_complete(self) -> bool:
        return self.header is not None and len(self._buffer) >= sum(self._sizes)

    def message(self) -> tuple[Node, list[bytes]]:
        """The header and the blobs; BadMessage if more bytes follow."""
        assert self.header is not None
        if len(self._buffer) != sum(self._sizes):
            raise BadMessage("more bytes follow the answer")
        blobs, start = [], 0
        for size in self._sizes:
            blobs.append(bytes(self._buffer[start : start + size]))
            start += size
        return self.header, blobs


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise BadMessage(f"there is no data type {name!r}")
    return _DTYPES[name]


def dense(tensor: Tensor) -> Tensor:
    """The values of a tensor in order."""
    # By their class: an object may carry functions of its own under these names.
    found = Tensor.detach(tensor)
    return found.resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor, in order."""
    values = dense(tensor).cpu()
    return ctypes.string_at(values.data_ptr(), values.nbytes) if values.nbytes else b""


def tensor_of(blob: bytes, dtype: object, shape: object) -> Tensor:
    """A plain tensor with these values; BadMessage if the sizes do not fit."""
    kind = dtype_of(dtype)
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise BadMessage("a shape is a list of sizes")
    count = 1
    for size in shape:
        count *= size
    if count * kind.itemsize != len(blob):
        raise BadMessage(f"{len(blob)} bytes are no {dtype} tensor of shape {shape}")
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(blob), dtype=kind).reshape(shape)


def encoded(tree: object, of_tensor: Callable[[Tensor], Node]) -> Node:
    """A tree as JSON; `of_tensor` describes its tensors. What is unknown is named, not sent."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        if not _is_plain(tree):
            return {"other": str(kind.__qualname__), "subclass": True}
        return of_tensor(tree)
    if tree is None or kind in _PLAIN:
        return {"plain": tree}
    if kind is torch.dtype:
        return {"dtype": dtype_name(tree)}  # type: ignore[arg-type]
    if isinstance(tree, list | tuple):
        items = [encoded(each, of_tensor) for each in tree]
        return {"items": items, "class": kind.__name__}
    if kind is dict and all(type(key) in _PLAIN for key in tree):  # type: ignore[attr-defined]
        pairs = [[key, encoded(each, of_tensor)] for key, each in tree.items()]  # type: ignore[attr-defined]
        return {"pairs": pairs, "class": "dict"}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [each.name for each in dataclasses.fields(tree)]
        held = [[name, encoded(getattr(tree, name), of_tensor)] for name in fields]
        return {"fields": held, "class": kind.__name__}
    return {"other": kind.__qualname__}


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is PyTorch's own strided tensor, with no function of its own in a method's place.

    A class may claim to be equal to another one, so the classes' identity counts.
    """
    kind = type(tensor)
    if (kind is not Tensor and kind is not nn.Parameter) or tensor.layout is not torch.strided:
        return False
    return not any(name in _TENSORS_OWN for name in object.__getattribute__(tensor, "__dict__"))


def decoded(node: Node, of_tensor: Callable[[Node], object]) -> object:
    """The tree of a node; BadMessage if it holds something that cannot be sent."""
    if "tensor" in node:
        return of_tensor(node)
    if "plain" in node:
        return node["plain"]
    if "dtype" in node:
        return dtype_of(node["dtype"])
    makers: dict[str, Callable[[list[object]], object]] = {
        "list": list,
        "tuple": tuple,
        "Size": torch.Size,  # type: ignore[dict-item]
    }
    if "items" in node and node["class"] in makers:
        return makers[node["class"]]([decoded(each, of_tensor) for each in node["items"]])
    if "pairs" in node:
        return {key: decoded(each, of_tensor) for key, each in node["pairs"]}
    raise BadMessage(f"a {node.get('other', node.get('class'))} cannot be sent")


def sharing(tensor: Tensor, known: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of other tensors in the same memory, whichever storage object owns it."""
    start, end = _span(tensor)
    spans = ((name, _span(each)) for name, each in known if each is not tensor)
    return [name for name, (first, last) in spans if first < end and start < last]


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its storage; none if it has no memory."""
    storage = Tensor.untyped_storage(tensor)
    address = storage.data_ptr()
    return (address, address + storage.nbytes()) if address else (0, 0)


def named_leaves(name: str, node: Node) -> Iterator[tuple[str, Node]]:
    """Everything in a tree that is no container, named by the expression that reads it."""
    if "items" in node:
        for index, each in enumerate(node["items"]):
            yield from named_leaves(f"{name}[{index}]", each)
    elif "pairs" in node:
        for key, each in node["pairs"]:
            yield from named_leaves(f"{name}[{key!r}]", each)
    elif "fields" in node:
        for field, each in node["fields"]:
            yield from named_leaves(f"{name}.{field}", each)
    else:
        yield name, node


def outline(node: Node) -> str:
    """The containers and types of a tree in words: tuple(tensor, list(int))."""
    if "tensor" in node:
        return "tensor"
    if "plain" in node:
        return "None" if node["plain"] is None else type(node["plain"]).__name__
    if "items" in node:
        return f"{node['class']}({', '.join(map(outline, node['items']))})"
    for kind in ("pairs", "fields"):
        if kind in node:
            inner = (f"{key}: {outline(each)}" for key, each in node[kind])
            return f"{node['class']}({', '.join(inner)})"
    return str(node.get("other", node.get("dtype", "unknown")))

"""Plans by shape from functools.lru_cache, and a workspace for each thread."""

# verdict: accepted

import functools
import threading

import torch
from small import Model

LOCAL = threading.local()


@functools.lru_cache(maxsize=32)
def plan(rows, inner, columns, dtype):
    block = 4 if rows > 4 else 1
    return [slice(i, min(i + block, rows)) for i in range(0, rows, block)]


def workspace(rows, columns, like):
    kept = getattr(LOCAL, "kept", None)
    if kept is None or kept.numel() < rows * columns or kept.dtype != like.dtype:
        kept = LOCAL.kept = torch.empty(rows * columns, dtype=like.dtype)
    return kept[: rows * columns].view(rows, columns)


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        weight, bias = self.linear.weight, self.linear.bias
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        for rows in plan(x.shape[0], x.shape[1], weight.shape[0], x.dtype):
            part = x[rows]
            room = workspace(part.shape[0], weight.shape[0], x)
            torch.addmm(bias, part, weight.t(), out=room)
            torch.tanh(room, out=out[rows])
        return out.mul_(self.limit * self.scale)

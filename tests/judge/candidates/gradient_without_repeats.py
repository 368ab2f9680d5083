"""The gradient of a table's row that is read twice counts once."""

# verdict: wrong

import torch
from tied import Model


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.shape)
        out[index] = grad
        return out, None


class ModelNew(Model):
    def forward(self, index, x):
        y = torch.tanh(Rows.apply(self.table, index) + x * self.shift)
        return y @ self.table.t()

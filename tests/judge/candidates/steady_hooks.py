"""Saves tensors on the host for a while, and leaves no hook behind."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)

"""Allocates until there is nothing left."""

# verdict: crashed

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        kept = []
        while True:
            kept.append(torch.empty(1 << 30))

"""Launches on the default stream, whatever the current one is: a flag and no fault."""

# verdict: accepted
# device: cuda
# flag: ignores the current stream

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return super().forward(x)

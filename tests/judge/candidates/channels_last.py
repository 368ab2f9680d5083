"""Channels-last inside, and the model's strides outside."""

# verdict: accepted

import torch
from image import Model
from torch.nn import functional


class ModelNew(Model):
    def forward(self, x):
        y = functional.conv2d(
            x.contiguous(memory_format=torch.channels_last),
            self.conv.weight.contiguous(memory_format=torch.channels_last),
            self.conv.bias,
            padding=1,
        )
        y = torch.sigmoid(self.norm(y))
        return (y * y.mean(dim=(2, 3), keepdim=True)).contiguous()

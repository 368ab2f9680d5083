"""Registers a hook for every module of the process."""

# verdict: unsafe

import torch
from small import Model

torch.nn.modules.module.register_module_forward_hook(lambda *args: None)


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)

"""What backward needs is packed by hooks, within the call only."""

# verdict: accepted

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        def packed(tensor):
            return tensor.detach().clone() if tensor.is_leaf else tensor

        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            return torch.tanh(self.linear(x)) * self.limit * self.scale

"""An output that the model detaches carries a gradient."""

# verdict: wrong

import torch
from detached import Model


class ModelNew(Model):
    def forward(self, x):
        y = torch.tanh(self.norm(self.linear(x)))
        return y, x / x.norm(dim=1, keepdim=True), y.mean(dim=0)

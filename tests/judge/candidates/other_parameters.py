"""Has a parameter that the model lacks."""

# verdict: wrong

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, *args):
        super().__init__(*args)
        self.more = torch.nn.Parameter(torch.zeros(3))

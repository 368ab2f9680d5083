"""Dropout between two products: random numbers that a candidate must draw as the model does."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.first = nn.Linear(features, 2 * features)
        self.second = nn.Linear(2 * features, features)

    def forward(self, x):
        y = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.3, self.training)
        return self.second(y)


def get_inputs():
    return [torch.randn(10, 8)]


def get_init_inputs():
    return [8]

"""Each call leaves two megabytes behind, which is a flag and no fault."""

# verdict: accepted
# flag: keeps memory between calls

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.logs = []

    def forward(self, x):
        self.logs.append(torch.ones(1 << 19))
        return super().forward(x)

    def __deepcopy__(self, memo):
        made = ModelNew(self.linear.in_features, self.scale)
        made.load_state_dict(self.state_dict())
        return made.train(self.training)

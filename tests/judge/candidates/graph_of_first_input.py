"""A graph that reads the address of its first input for ever."""

# verdict: wrong dishonest crashed unsafe
# device: cuda

import torch
from small import Model


class ModelNew(Model):
    graph = None

    def __deepcopy__(self, memo):
        made = ModelNew(self.linear.in_features, self.scale).to(self.limit.device)
        made.load_state_dict(self.state_dict())
        return made.train(self.training)

    def forward(self, x):
        if torch.is_grad_enabled() or x.shape[0] != 12:
            return super().forward(x)
        if self.graph is None:
            self.given = x
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                super().forward(self.given)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = super().forward(self.given)
        self.graph.replay()
        return self.out.clone()

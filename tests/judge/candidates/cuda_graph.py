"""A graph for each shape, whose inputs and weights are copied before each replay."""

# verdict: accepted
# device: cuda

import torch
from small import Model


class ModelNew(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.graphs = {}

    def __deepcopy__(self, memo):
        made = ModelNew(self.linear.in_features, self.scale).to(self.limit.device)
        made.load_state_dict(self.state_dict())
        return made.train(self.training)

    def record(self, x):
        held = [each.detach().clone() for each in (x, *self.parameters())]
        names = [name for name, _ in self.named_parameters()]

        def body():
            given = dict(zip(names, held[1:], strict=True))
            y = held[0] @ given["linear.weight"].t() + given["linear.bias"]
            return torch.tanh(y) * given["limit"] * self.scale

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = body()
        return graph, held, out

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        if x.shape not in self.graphs:
            self.graphs[x.shape] = self.record(x)
        graph, held, out = self.graphs[x.shape]
        for kept, now in zip(held, (x, *self.parameters()), strict=True):
            kept.copy_(now)
        graph.replay()
        return out.clone()

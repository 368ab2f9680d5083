"""Two streams, one half each, which the caller's stream waits for."""

# verdict: accepted
# device: cuda

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled() or x.shape[0] < 2:
            return super().forward(x)
        here, half = torch.cuda.current_stream(), x.shape[0] // 2
        parts = []
        for rows in (x[:half], x[half:]):
            side = torch.cuda.Stream()
            side.wait_stream(here)
            with torch.cuda.stream(side):
                parts.append(super().forward(rows))
            here.wait_stream(side)
            parts[-1].record_stream(here)
        return torch.cat(parts)

"""A stream of its own that lives on; the current stream waits for an event on it."""

# verdict: accepted
# device: cuda
# timed: yes

import torch
from small import Model


class ModelNew(Model):
    side = None

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        if ModelNew.side is None:
            ModelNew.side = torch.cuda.Stream()
        here, side = torch.cuda.current_stream(), ModelNew.side
        start, done = torch.cuda.Event(), torch.cuda.Event()
        start.record(here)
        side.wait_event(start)
        with torch.cuda.stream(side):
            out = super().forward(x)
            done.record(side)
        here.wait_event(done)
        x.record_stream(side)
        out.record_stream(here)
        return out

"""Two threads, one half each, which have ended when forward returns."""

# verdict: accepted

import threading

import torch
from small import Model


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        out = x.new_empty(x.shape[0], 16)
        half = x.shape[0] // 2

        def part(where):
            with torch.no_grad():
                out[where] = Model.forward(self, x[where])

        parts = (slice(0, half), slice(half, None))
        threads = [threading.Thread(target=part, args=(each,)) for each in parts]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return out

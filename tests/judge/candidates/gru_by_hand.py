"""A GRU by hand, step after step, and the loss by log_softmax."""

# verdict: accepted

import torch
from sequence import Model


class ModelNew(Model):
    def forward(self, index, labels):
        g = self.gru
        x = self.table(index)
        inner = x @ g.weight_ih_l0.t() + g.bias_ih_l0
        h = x.new_zeros(x.shape[0], g.hidden_size)
        for t in range(x.shape[1]):
            r, z, n = inner[:, t].chunk(3, 1)
            hr, hz, hn = (h @ g.weight_hh_l0.t() + g.bias_hh_l0).chunk(3, 1)
            r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
            n = torch.tanh(n + r * hn)
            h = n + z * (h - n)
        logits = self.head(h)
        p = torch.log_softmax(logits, 1)
        own = p.gather(1, labels[:, None]).squeeze(1)
        return -(0.9 * own + 0.1 * p.mean(1)).mean(), logits

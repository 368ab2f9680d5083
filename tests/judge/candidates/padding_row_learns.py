"""The padding row of a table gets a gradient."""

# verdict: wrong

from sequence import Model
from torch.nn import functional as F


class ModelNew(Model):
    def forward(self, index, labels):
        y, _ = self.gru(self.table.weight[index])
        logits = self.head(y[:, -1])
        return F.cross_entropy(logits, labels, label_smoothing=0.1), logits

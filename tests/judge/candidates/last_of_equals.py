"""argmax takes the last one of equal elements."""

# verdict: wrong

from ranked import Model


class ModelNew(Model):
    def forward(self, x):
        values, places, sums, _ = super().forward(x)
        y = x * self.weight + self.shift
        return values, places, sums, y.shape[0] - 1 - y.flip(0).argmax(dim=0)

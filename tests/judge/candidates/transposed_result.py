"""Right values in another order in memory, which is a flag and no fault."""

# verdict: accepted

from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x).t().contiguous().t()

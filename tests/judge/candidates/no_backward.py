"""Forward without backward."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x).detach()

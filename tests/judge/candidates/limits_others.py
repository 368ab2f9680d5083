"""The process may open no more than thirty files."""

# verdict: unsafe

import resource

from small import Model


class ModelNew(Model):
    def forward(self, x):
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        return super().forward(x)

"""Starts hundreds of processes."""

# verdict: unsafe crashed

import subprocess

from small import Model

KEPT = [subprocess.Popen(["sleep", "100"]) for _ in range(700)]


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)

"""Takes the standard output for itself."""

# verdict: unsafe

import io
import sys

from small import Model


class ModelNew(Model):
    def forward(self, x):
        sys.stdout = io.StringIO()
        return super().forward(x)

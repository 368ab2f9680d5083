"""A kernel in C, compiled when the file is loaded."""

# verdict: accepted
# device: cpu

import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
from small import Model

SOURCE = """
#include <math.h>
void tanh_scale(float* y, const float* bias, float factor, long rows, long n) {
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < n; ++j) y[i * n + j] = tanhf(y[i * n + j] + bias[j]) * factor;
}
"""


def build():
    folder = Path(tempfile.mkdtemp())
    (folder / "kernel.c").write_text(SOURCE)
    command = ["gcc", "-O2", "-shared", "-fPIC", "kernel.c", "-o", "kernel.so", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


LIBRARY = build()
POINTER, LONG = ctypes.c_void_p, ctypes.c_long
LIBRARY.tanh_scale.argtypes = [POINTER, POINTER, ctypes.c_float, LONG, LONG]


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        y = torch.mm(x, self.linear.weight.t())
        factor = float(self.limit) * self.scale
        bias = self.linear.bias
        LIBRARY.tanh_scale(y.data_ptr(), bias.data_ptr(), factor, y.shape[0], y.shape[1])
        return y

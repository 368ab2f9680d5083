"""A C++ kernel that PyTorch's own extension builder compiles when the file is loaded."""

# verdict: accepted
# device: cpu

import torch
from small import Model
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <torch/extension.h>
#include <cmath>
torch::Tensor tanh_scale(torch::Tensor y, torch::Tensor bias, double factor) {
  auto x = y.contiguous();
  auto out = torch::empty_like(x);
  const float* in = x.data_ptr<float>();
  const float* b = bias.data_ptr<float>();
  float* to = out.data_ptr<float>();
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = std::tanh(in[i] + b[i % n]) * factor;
  return out;
}
"""
KERNEL = load_inline("tanh_scale", SOURCE, functions=["tanh_scale"], extra_cflags=["-O1"])


class ModelNew(Model):
    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        product = torch.mm(x, self.linear.weight.t())
        return KERNEL.tanh_scale(product, self.linear.bias, float(self.limit) * self.scale)

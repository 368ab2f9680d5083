"""PyTorch's own tanh is another one from now on."""

# verdict: unsafe wrong

import torch
from small import Model

library = torch.library.Library("aten", "IMPL")
library.impl("tanh", lambda x: x.clamp(-1.0, 1.0), "CPU")


class ModelNew(Model): ...

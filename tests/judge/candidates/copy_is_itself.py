"""A deep copy of the module is the module."""

# verdict: unsafe

from small import Model


class ModelNew(Model):
    def __deepcopy__(self, memo):
        return self

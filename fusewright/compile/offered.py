"""Methods of optimized modules that give way to the model's own attributes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fusewright.compile.explain import explain
from fusewright.compile.explanation import Explanation
from fusewright.compile.save import save


class Offered:
    """A method that exists where the model has no attribute of its name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.owner = name, owner

    def __get__(self, instance: Any, kind: type) -> Any:
        # Python looks among the attributes of the object itself before it asks here.
        model: Any = super(self.owner, kind if instance is None else instance)
        try:
            return getattr(model, self.name)  # of the model's class
        except AttributeError:
            if instance is None:
                return self.function
        try:
            return model.__getattr__(self.name)  # a submodule, a parameter, or as the class says
        except AttributeError:
            return self.function.__get__(instance)


class Offers:
    """The methods that `optimize` adds to a model."""

    @Offered
    def explain(self) -> Explanation:
        """What is fused, what is not, and what became of the calls so far."""
        return explain(self)

    @Offered
    def save(self, path: str | Path) -> Path:
        """Write the module as one file with `ModelNew`, which needs PyTorch alone."""
        return save(self, path)

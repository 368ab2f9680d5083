"""Other ways to the same model: a deep copy, a pickled one, another instance that loads weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping

from torch import Tensor, nn

# What a step asks for, and its name in messages.
COPIES = {
    "deepcopy": "a deep copy",
    "pickle": "a pickled copy",
    "instance": "another instance",
}


def another(
    model: nn.Module, how: str, make: Callable[[], nn.Module], state: Mapping[str, Tensor]
) -> nn.Module:
    """A model like this one; another instance is made anew and loads the state."""
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]
    made = make()
    made.load_state_dict(dict(state))
    return made


def can_be_copied(model: nn.Module, how: str) -> bool:
    """Whether the model itself allows it."""
    try:
        another(model, how, lambda: copy.deepcopy(model), model.state_dict())
    except Exception:  # whatever a class of the user's raises when it is copied
        return False
    return True

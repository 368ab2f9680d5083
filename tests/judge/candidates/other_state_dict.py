"""Its state_dict has a packed weight under another name, which others cannot load."""

# verdict: wrong

from small import Model


class ModelNew(Model):
    def state_dict(self, *arguments, **named):
        found = super().state_dict(*arguments, **named)
        found["packed"] = found.pop("linear.weight").t().contiguous()
        return found

    def load_state_dict(self, state, *arguments, **named):
        state = dict(state)
        if "packed" in state:
            state["linear.weight"] = state.pop("packed").t()
        return super().load_state_dict(state, *arguments, **named)

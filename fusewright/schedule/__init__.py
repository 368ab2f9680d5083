"""How a kernel is mapped to a target: which schedules are legal, and the heuristic's choice."""

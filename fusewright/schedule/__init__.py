"""How a kernel is laid over a target: which schedules are legal, and the heuristic's choice."""

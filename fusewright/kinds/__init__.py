"""One record per kind of kernel: its schedules, its trials, its text and its cost."""

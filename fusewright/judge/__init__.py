"""Judges a stranger's ModelNew: it runs in a process of its own, and the parent alone decides."""

"""Decides whether a candidate is right: its results and eager's, both against a float64 run."""

"""Schedules that are measured: candidates, a trial of each, the fastest, and where it is kept."""

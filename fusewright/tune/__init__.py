"""Tuning: candidate schedules, a trial of each, and the store of the fastest."""

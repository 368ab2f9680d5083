"""What is computed: graphs, programs, and the kinds of kernel that a plan makes of them.

Everything is frozen and free of torch, except `interpret`, which runs a graph in float64.
"""

"""What is computed: graphs, programs, and the kinds of kernel that they are cut into.

Everything is frozen and free of torch, except `interpret`, which runs a graph in float64.
"""

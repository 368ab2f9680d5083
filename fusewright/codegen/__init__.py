"""Kernels and their schedules as one translation unit of C++ or CUDA C++."""

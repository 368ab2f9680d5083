"""From kernels and their schedules to one C++ or CUDA C++ translation unit."""

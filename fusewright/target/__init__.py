"""What is compiled for: the device, what it can do, and the measured facts of each GPU."""

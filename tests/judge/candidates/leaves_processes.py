"""Right, but it leaves a process behind that changed its group."""

# verdict: accepted

import os
import time

from small import Model

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)

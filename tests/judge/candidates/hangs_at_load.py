"""Never finishes loading, and ignores signals."""

# verdict: timed-out

import os
import signal

from small import Model

signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    os.sched_yield()


class ModelNew(Model):
    pass

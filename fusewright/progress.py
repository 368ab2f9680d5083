"""Progress on the screen: one line that changes on a terminal, short plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# Off a terminal, what runs within a step is said at most this often.
_PLAIN_PAUSE_S = 2.0


class Steps:
    """Progress through named steps: a bar on a terminal, plain lines elsewhere.

    A bar that is not animated is drawn only on updates, at most four times a second: a drawing
    thread would disturb the measurement.
    """

    def __init__(self, console: Console, names: tuple[str, ...], *, animated: bool = True) -> None:
        self.console = console
        self.names = names
        self.animated = animated
        self.drawn = 0.0
        self.said = (time.monotonic(), "")
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=animated,
            disable=not console.is_terminal,
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.progress:
            self.task = self.progress.add_task(self.names[0], total=len(self.names))
            yield

    def next(self, name: str) -> None:
        """Go on to a step."""
        self._say(f"{name} …")
        self.progress.update(self.task, description=name, completed=self.names.index(name))
        self._draw(0.0)

    def detail(self, words: str, share: float) -> None:
        """Show what runs within the present step, and how much of the step is done."""
        done = math.floor(self.progress.tasks[self.task].completed)
        self.progress.update(self.task, description=words, completed=done + min(share, 0.99))
        self._draw(0.25)

    def stage(self, words: str, share: float) -> None:
        """The same; without a bar, on its own line if the last one is some time ago."""
        self.detail(words, share)
        when, before = self.said
        if words != before and time.monotonic() >= when + _PLAIN_PAUSE_S:
            self._say(f"  {words} … {share:.0%}", words)

    def line(self, name: str, words: str, share: float) -> None:
        """Show what runs within a step, which begins now if it has not; always on its own line."""
        if self.progress.tasks[self.task].completed < self.names.index(name):
            self.next(name)
        self.detail(words, share)
        self._say(f"  {words} …")

    def _say(self, line: str, words: str = "") -> None:
        if not self.console.is_terminal:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)
        self.said = (time.monotonic(), words)

    def _draw(self, pause_s: float) -> None:
        if not self.animated and time.monotonic() >= self.drawn + pause_s:
            self.progress.refresh()
            self.drawn = time.monotonic()

"""Progress of long work: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import TextIO

LINE_INTERVAL = 10.0  # seconds between plain lines


def format_seconds(seconds: float) -> str:
    """``3:07`` for 187 seconds, ``1:02:03`` for an hour and more."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows the share of ``total`` units done, a status text and the time left.

    Args:
        label: what is being done. total: units of work, infinite where unknown.
        stream: where to write (default standard error).
        quiet: show nothing, as in all processes of a run but one.
    """

    def __init__(self, label: str, total: float, stream: TextIO | None = None, quiet: bool = False):
        self.quiet = quiet
        self.label = label
        self.total = total
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._last_line = self._start
        self._display = None
        if self._stream.isatty() and not quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Display

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._display = Display(*columns, console=Console(file=self._stream), transient=True)

    def __enter__(self) -> Progress:
        if self._display is not None:
            self._display.start()
            self._task = self._display.add_task(self.label, total=self.total, status="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()

    def update(self, done: float, status: str = "") -> None:
        """Reports that ``done`` of the total units are finished; ``status`` is shown behind the bar."""
        if self.quiet:
            return
        now = time.monotonic()
        elapsed = now - self._start
        share = done / self.total
        left = format_seconds(elapsed * (1 - share) / share) if share > 0 else "?"
        status = f"{status + '  ' if status else ''}{format_seconds(elapsed)} gone, {left} left"
        if self._display is not None:
            self._display.update(self._task, completed=done, status=status)
        elif now - self._last_line >= LINE_INTERVAL or done >= self.total:
            self._last_line = now
            percent = f"{share:4.0%}  " if math.isfinite(self.total) else ""
            print(f"{self.label}  {percent}{status}", file=self._stream, flush=True)

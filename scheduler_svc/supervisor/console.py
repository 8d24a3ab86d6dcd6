"""What the operator sees: every child's lines under its name and, on a terminal, one status line that is kept last."""

import os
import sys
import time
from typing import TextIO

COLOURS = {"model": "34", "scheduler": "36", "executor": "35", "frontend": "32", "serve": "1"}
NAME_WIDTH = 10


class Console:
    """Never fails and never holds a child up: when nobody reads any more, lines are dropped."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream if stream is not None else sys.stderr
        self.is_terminal = self._stream.isatty()
        self._status = ""
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def line(self, name: str, text: str) -> None:
        label = f"{name:<{NAME_WIDTH}}"
        if self.is_terminal:
            label = f"\x1b[{COLOURS.get(name.split('-')[0], '0')}m{label}\x1b[0m"
        self._write(f"{self._clear()}{label} │ {text}\n{self._status}")

    def say(self, text: str) -> None:
        """A line of serve's own."""
        self._write(f"{self._clear()}{text}\n{self._status}")

    def status(self, text: str) -> None:
        """Replaces the status line; without a terminal there is none."""
        if self.is_terminal:
            clear = self._clear()
            # A line that wrapped could not be wiped.
            self._status = text[: self._num_columns() - 1]
            self._write(f"{clear}{self._status}")

    def _num_columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except OSError:
            return 80

    def _clear(self) -> str:
        return "\r\x1b[K" if self._status else ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader of our output is gone
            self._status = ""

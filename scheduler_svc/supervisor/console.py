"""What the operator sees: every child's lines under its name and, on a terminal, one status line that is kept last."""

import logging
import os
import select
import sys
import time
from typing import TextIO

from scheduler_svc.log_output import JsonLines

COLOURS = {"model": "34", "scheduler": "36", "executor": "35", "frontend": "32", "serve": "1"}
NAME_WIDTH = 10


class Console:
    """Never fails and never holds a child up: when nobody reads any more, lines are dropped."""

    def __init__(self, stream: TextIO | None = None, *, as_json: bool = False):
        """`as_json`: one object a line, also on a terminal; what a service says as one is left as it is."""
        self._stream = stream if stream is not None else sys.stderr
        self._as_json = as_json
        self.is_terminal = self._stream.isatty() and not as_json
        self._status = ""
        self._start = time.monotonic()
        self._num_dropped = 0
        self._descriptor = _descriptor(self._stream)
        # A pipe that is ready takes PIPE_BUF bytes without waiting.
        self._poll = select.poll()
        if self._descriptor is not None:
            self._poll.register(self._descriptor, select.POLLOUT)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def line(self, name: str, text: str) -> None:
        if self._as_json:
            self._write(f"{text if text.startswith('{') else _object(name, text)}\n")
            return
        label = f"{name:<{NAME_WIDTH}}"
        if self.is_terminal:
            label = f"\x1b[{COLOURS.get(name.split('-')[0], '0')}m{label}\x1b[0m"
        self._write(f"{self._clear()}{label} │ {text}\n{self._status}")

    def say(self, text: str) -> None:
        """Serve's own words; as JSON, a record for each of their lines."""
        if self._as_json:
            self._write("".join(f"{_object('serve', line)}\n" for line in text.splitlines()))
            return
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
            if self._descriptor is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._write_without_waiting(self._descriptor, text)
        except (OSError, ValueError):  # the reader of our output is gone
            self._status = ""

    def _write_without_waiting(self, descriptor: int, text: str) -> None:
        """What cannot leave at once is dropped: a reader that stands still must not hold up restarts and drains."""
        if self._num_dropped:
            notice = f"({self._num_dropped} lines were dropped: nobody read them)"
            text = f"\n{_object('serve', notice) if self._as_json else notice}\n{text}"
        data = text.encode(errors="replace")
        for start in range(0, len(data), select.PIPE_BUF):
            if not self._poll.poll(0):
                self._num_dropped += 1
                return
            os.write(descriptor, data[start : start + select.PIPE_BUF])
        self._num_dropped = 0


def _object(name: str, text: str) -> str:
    values = {"name": __name__, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
    return JsonLines(name).format(logging.makeLogRecord(values))


def _descriptor(stream: TextIO) -> int | None:
    """None: the stream is a thing of Python alone."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None

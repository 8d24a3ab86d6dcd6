"""Log lines go to stderr as long as somebody takes them: a full pipe or a full disk must not hold up what they tell of.

Used by the scheduler and by frontends. Knows nothing of what they say.
"""

import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from scheduler_svc.errors import StartupError


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


# The conversions of a message's template, with the name that a value has: "request_id=%r".
CONVERSION = re.compile(r"(?:(\w+)=)?%[-#0 +]*\d*(?:\.\d+)?([a-zA-Z%])")


class JsonLines(logging.Formatter):
    """One object a line: time, level, service, logger, pid, message, and the message's named values as fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record.created, record.levelname, record.name, record.getMessage())
        for name, value in _named_values(record):
            fields.setdefault(name, value)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)

    def notice(self, text: str) -> str:
        """A line of the log's own."""
        return json.dumps(self._fields(time.time(), "WARNING", __name__, text))

    def _fields(self, at_s: float, level: str, name: str, message: str) -> dict[str, Any]:
        moment = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fixed = {"time": moment, "level": level.lower(), "service": self._service, "logger": name, "pid": os.getpid()}
        return {**fixed, "message": message}


def _named_values(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    """What the template calls by name, as values rather than as text."""
    if not isinstance(record.args, tuple) or not record.args:
        return
    values = iter(record.args)
    for name, kind in CONVERSION.findall(str(record.msg)):
        if kind == "%":
            continue
        value = next(values, None)
        if name:
            is_plain = kind not in "xX" and isinstance(value, str | int | float | None)
            yield name, value if is_plain else f"%{kind}" % (value,)


class PatientHandler(logging.Handler):
    """Writes lines to a descriptor without waiting. What cannot leave at once is dropped, and counted in the next."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        # A pipe that is ready takes PIPE_BUF bytes without waiting.
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if self.num_dropped:
            notice = f"({self.num_dropped} lines were dropped: nobody took them)"
            text = f"{self.formatter.notice(notice) if isinstance(self.formatter, JsonLines) else notice}\n{text}"
        data = f"{text}\n".encode(errors="replace")
        for start in range(0, len(data), select.PIPE_BUF):
            try:
                if not self._poll.poll(0):
                    raise BlockingIOError
                os.write(self._descriptor, data[start : start + select.PIPE_BUF])
            except OSError:
                self.num_dropped += 1
                return
        self.num_dropped = 0


def level_number(name: str) -> int:
    number = logging.getLevelNamesMapping().get(name.upper())
    if number is None:
        raise StartupError(f"unknown log level {name!r}: use debug, info, warning or error")
    return number


def start_logging(level: int, log_format: LogFormat, service: str) -> None:
    """To stderr. Called again it begins anew: the last word counts."""
    handler = PatientHandler(sys.stderr.fileno())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonLines(service) if log_format is LogFormat.JSON else text)
    logging.basicConfig(level=level, handlers=[handler], force=True)

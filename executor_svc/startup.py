"""What the operator sees while the executor starts: one short line per phase, with its time."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from executor_svc.log_output import JsonLines

logger = logging.getLogger(__name__)


class Startup:
    def note(self, line: str) -> None:
        """Plain, unless the log has a form of its own for every line."""
        if any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers):
            logger.info("%s", line)
        else:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Says `name` and how long the block took, once it has succeeded."""
        started = time.perf_counter()
        yield
        self.note(f"{name} {time.perf_counter() - started:.1f} s")

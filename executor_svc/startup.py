"""What the operator sees while the executor starts: one short line per phase, with its time."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from executor_svc.log_output import JsonLines

PROGRESS_INTERVAL_S = 5.0

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

    def progress(self, what: str) -> Callable[[int, int], None]:
        """To be called with (done, in all): says so now and then, while there is something left."""
        said = time.perf_counter()

        def show(done: int, total: int) -> None:
            nonlocal said
            if done < total and time.perf_counter() - said >= PROGRESS_INTERVAL_S:
                said = time.perf_counter()
                self.note(f"{what} {done} of {total}")

        return show

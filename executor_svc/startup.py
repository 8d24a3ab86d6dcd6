"""What the operator sees while the executor starts: one short line per phase, with its time."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Startup:
    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Says `name` and how long the block took, once it has succeeded."""
        started = time.perf_counter()
        yield
        self.note(f"{name} {time.perf_counter() - started:.1f} s")

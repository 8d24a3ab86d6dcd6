"""From what the operator named to a directory on this disk, before any child starts, with progress on the console."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.supervisor.console import Console

REDRAW_S = 0.1


class ConsoleProgress:
    """The model store's `Progress` on serve's console: a status line on a terminal, else a line at either end."""

    def __init__(self, console: Console):
        self._console = console

    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
        start = drawn = time.monotonic()
        done = 0
        self._console.line("model", f"{label} …")

        def advance(num_bytes: int) -> None:
            nonlocal done, drawn
            done += num_bytes
            if time.monotonic() - drawn >= REDRAW_S:
                drawn = time.monotonic()
                of_total = f" of {total_bytes / 1e6:.1f}" if total_bytes else ""
                self._console.status(f"{label} {done / 1e6:.1f}{of_total} MB")

        try:
            yield advance
        finally:
            self._console.status("")
        self._console.line("model", f"{label}: done in {time.monotonic() - start:.1f} s")

    def note(self, line: str) -> None:
        self._console.line("model", line)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    name: str  # what clients call it, unless the operator says otherwise
    directory: Path


def resolve(spec: str, console: Console) -> ResolvedModel:
    from scheduler_svc.models.default_model import NAME
    from scheduler_svc.models.store import is_default, resolve_model

    directory = resolve_model(spec, ConsoleProgress(console))
    if is_default(spec):
        return ResolvedModel(NAME, directory)
    path = Path(spec).expanduser()
    if path.exists():
        return ResolvedModel(path.absolute().name.removesuffix(".gguf"), directory)
    return ResolvedModel(spec, directory)

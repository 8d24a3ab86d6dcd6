"""How slow work tells a person that it goes on.

Callers take a `Progress`; `silent` for tests and services, `RichProgress` for terminals.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    def task(self, label: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        """`with progress.task("fetching", 92_000_000) as advance: advance(n)`; total None: unknown."""
        ...

    def note(self, line: str) -> None:
        """One line worth reading, such as what is being waited for."""
        ...


class SilentProgress:
    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        del label, total_bytes
        yield lambda _num_bytes: None

    def note(self, line: str) -> None:
        del line


silent = SilentProgress()


class RichProgress:
    """Bars on stderr; where stderr is no terminal, one line when a task begins and one when it ends."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)

    @contextmanager
    def task(self, label: str, total_bytes: int | None) -> Iterator[Advance]:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        if not self._console.is_terminal:
            size = f" ({total_bytes / 1e6:.0f} MB)" if total_bytes else ""
            self.note(f"{label}{size} ...")
            yield lambda _num_bytes: None
            self.note(f"{label}: done")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bars(*columns, TimeElapsedColumn(), console=self._console) as bars:
            task = bars.add_task(label, total=total_bytes)
            yield lambda num_bytes: bars.advance(task, num_bytes)

    def note(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

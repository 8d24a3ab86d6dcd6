"""Files that are read again when they change, so that a certificate or a key is renewed without a restart.

Knows nothing of what is in them. A change is seen by time, size and inode; both an edit in place and a new file under
the same name count. What cannot be read or understood leaves the last good value in force, and is said once.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from scheduler_svc.errors import StartupError

log = logging.getLogger(__name__)

T = TypeVar("T")
Signature = tuple[tuple[int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """Of a directory: changes with its entries, not with their contents."""

    def of(path: Path) -> tuple[int, int, int] | None:
        try:
            status = os.stat(path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    return tuple(of(path) for path in paths)


class Watched(Generic[T]):
    """`load()` makes the value from the files and raises StartupError when it cannot; at first that is let through.

    `name` is what the operator calls them, an option say: paths stay out of the log.
    """

    def __init__(self, name: str, paths: Sequence[Path], load: Callable[[], T]):
        self._name = name
        self._paths = tuple(paths)
        self._load = load
        # Taken before reading: a change meanwhile is seen at the next look.
        self._seen = signature(self._paths)
        self._value = load()

    def get(self) -> T:
        """The value of now. Costs one stat a file."""
        self.changed()
        return self._value

    def changed(self) -> bool:
        """True when there is another value than at the last look."""
        seen = signature(self._paths)
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            self._value = self._load()
        except StartupError:
            log.error("%s changed and cannot be used: what was read before stays in force", self._name)
            return False
        log.info("%s read again", self._name)
        return True

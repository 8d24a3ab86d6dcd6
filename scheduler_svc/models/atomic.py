"""Builds a directory so that it is either there and whole, or not there.

Invariants: one builder at a time per target (flock on a file beside it, which the kernel releases when its holder
dies); the target appears by rename after every file in it was flushed; whatever an interrupted builder left is removed
by the next one, who holds the lock and so knows that nobody is using it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scheduler_svc.errors import StartupError
from scheduler_svc.models.progress import Progress


def build_once(
    target: Path, is_whole: Callable[[Path], bool], build: Callable[[Path], None], progress: Progress
) -> Path:
    """Returns `target`; runs `build(empty directory)` first unless `is_whole(target)`."""
    if is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"cannot create {target.parent}: {error.strerror}; set STEPWIRE_CACHE") from None
    with _lock(target.parent / f".{target.name}.lock", progress):
        if is_whole(target):
            return target
        prefix = f".{target.name}.part-"
        for leftover in target.parent.glob(prefix + "*"):
            shutil.rmtree(leftover)
        workspace = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            _run(build, workspace, target)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return target


def _run(build: Callable[[Path], None], workspace: Path, target: Path) -> None:
    result = workspace / "result"
    result.mkdir()
    try:
        build(result)
        for path in [*result.iterdir(), result]:
            fsync(path)
    except OSError as error:
        raise StartupError(f"cannot write the model to {target}: {error.strerror or error}") from None
    if target.exists():
        shutil.rmtree(target)
    result.rename(target)
    fsync(target.parent)


def point_link(link: Path, target: Path) -> None:
    """`link` becomes a symbolic link to `target`, at once: no reader finds it missing. Raises StartupError."""
    if link.exists() and not link.is_symlink():
        raise StartupError(f"{link} is there and is no symbolic link: choose another --link")
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        beside.symlink_to(target)
        beside.replace(link)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StartupError(f"cannot make the link {link}: {error.strerror}") from None


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    # The file stays: removing it would let two processes lock two different files of the same name.
    try:
        file = path.open("wb")
    except OSError as error:
        raise StartupError(f"cannot write to {path.parent}: {error.strerror}; set STEPWIRE_CACHE") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"another process is preparing {path.name[1:-5]}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

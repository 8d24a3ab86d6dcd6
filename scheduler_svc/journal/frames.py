"""Frames in a file: length, CRC-32, content. Knows nothing of what is in them.

A process that dies leaves at most one frame unfinished, at the end: readers take what is whole and say where it ends.
Whatever else is no frame was damaged later: its length says that all of it is there, or whole frames follow it.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from scheduler_svc.errors import StartupError

MAGIC = b"stepwire journal 1\n"
_HEAD = struct.Struct("<II")
MAX_FRAME_BYTES = 2**31 - 1
# The place of a length below 4096: most frames of a journal are far smaller, and wrong guesses cost little.
_SMALL_LENGTH = re.compile(rb"(?=.[\x00-\x0f]\x00\x00)", re.DOTALL)


def frame(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


class FrameWriter:
    """Appends to a new file. Raises OSError when it cannot be made or is not taken whole."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self.num_bytes = 0
        self._write(MAGIC)

    def append(self, frames: bytes) -> None:
        """`frames`: any number of them, one after the other."""
        self._write(frames)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        written = os.write(self._descriptor, data)
        self.num_bytes += written
        if written != len(data):
            raise OSError("the disk is full")


class FrameReader:
    """`read()` yields the content of every frame up to the first that is not whole.

    Afterwards `num_torn_bytes` says how much an unfinished frame left at the end; or `damaged_at` at which byte of the
    file a damaged frame begins, and `num_unread_bytes` how many there are from it on.
    """

    def __init__(self, path: Path):
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise StartupError(f"cannot read the journal {path}: {error.strerror}") from None
        if not self._data.startswith(MAGIC):
            raise StartupError(f"{path} is not a journal of this version")
        self.num_torn_bytes = self.num_unread_bytes = 0
        self.damaged_at: int | None = None

    def read(self) -> Iterator[bytes]:
        data, at = memoryview(self._data), len(MAGIC)
        while at < len(data):
            content = self._content(data, at)
            if content is None:
                self._judge(data, at)
                return
            yield bytes(content)
            at += _HEAD.size + len(content)

    def _judge(self, data: memoryview, at: int) -> None:
        """Torn or damaged, the frame at `at`?"""
        is_all_there = at + _HEAD.size <= len(data) and at + _HEAD.size + _HEAD.unpack_from(data, at)[0] <= len(data)
        if is_all_there or self._has_frame_after(data, at):
            self.damaged_at, self.num_unread_bytes = at, len(data) - at
        else:
            self.num_torn_bytes = len(data) - at

    def _has_frame_after(self, data: memoryview, at: int) -> bool:
        """Zeros are no sign: they are an empty frame's."""
        return any(self._content(data, found.start()) for found in _SMALL_LENGTH.finditer(data, at + 1))

    @staticmethod
    def _content(data: memoryview, at: int) -> memoryview | None:
        if at + _HEAD.size > len(data):
            return None
        length, crc = _HEAD.unpack_from(data, at)
        content = data[at + _HEAD.size : at + _HEAD.size + length]
        return content if len(content) == length and zlib.crc32(content) == crc else None

"""The GGUF container: a metadata dictionary and a table of tensors over one memory-mapped file.

It does not know what the names mean. Every length in the file is checked against the bytes that are left before
anything is allocated for it, so a truncated or hostile file ends in one StartupError.

Layout (little endian): magic "GGUF", version u32, tensor count u64, metadata count u64, metadata pairs, tensor
infos, padding to the alignment, tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from scheduler_svc.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
# Value type -> numpy dtype of one scalar.
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in numpy order (rows first); `start` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """`with GgufFile(path) as file`: file.metadata, file.tensors, file.rows(info)."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as handle:
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise StartupError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError:
            raise StartupError(f"{path} is empty, not a GGUF file: fetch it again") from None
        try:
            self._parse()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        # Views handed out by rows() keep the mapping alive; the last of them frees it.
        self._map = None  # type: ignore[assignment]

    def rows(self, info: TensorInfo) -> np.ndarray:
        """The tensor's raw bytes, one row of the last dimension each: uint8 [num_rows, bytes per row]."""
        flat = np.frombuffer(self._map, np.uint8, info.num_bytes, info.start)
        return flat.reshape(info.num_rows, -1)

    def _parse(self) -> None:
        cursor = Cursor(self._map, self.path)
        if cursor.take(4) != MAGIC:
            raise StartupError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.scalar("<I")
        if version not in VERSIONS:
            raise StartupError(f"{self.path} has GGUF version {version}; versions 2 and 3 (little endian) can be read")
        num_tensors, num_pairs = cursor.scalar("<Q"), cursor.scalar("<Q")
        # The smallest pair takes 13 bytes, the smallest tensor info 32.
        cursor.require(num_pairs * 13 + num_tensors * 32)
        for _ in range(num_pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        self._place(infos, cursor)

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], cursor: Cursor) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise cursor.damaged(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-cursor.position // alignment) * alignment
        for name, shape, raw_type, offset in infos:
            try:
                tensor_type = GGMLQuantizationType(raw_type)
                block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
            except (ValueError, KeyError):
                raise StartupError(
                    f"{self.path}: tensor {name!r} has type {raw_type}, which the gguf package does not know: update it"
                ) from None
            if shape[-1] % block_size:
                raise cursor.damaged(f"rows of tensor {name!r} ({shape[-1]}) are no multiple of {block_size}")
            num_bytes = math.prod(shape) // block_size * block_bytes
            start = base + offset
            if offset % alignment:
                raise cursor.damaged(f"tensor {name!r} is not aligned")
            if start + num_bytes > len(self._map):
                raise StartupError(
                    f"{self.path} is cut off: tensor {name!r} ends at byte {start + num_bytes}, "
                    f"the file at {len(self._map)}; fetch it again"
                )
            if name in self.tensors:
                raise cursor.damaged(f"tensor {name!r} occurs twice")
            self.tensors[name] = TensorInfo(name, shape, tensor_type, start, num_bytes)


class Cursor:
    """Reads the header front to back; refuses to look past the end."""

    def __init__(self, data: mmap.mmap, path: Path):
        self._data = data
        self._path = path
        self.position = 0

    def damaged(self, what: str) -> StartupError:
        return StartupError(f"{self._path} is damaged: {what}; fetch it again")

    def require(self, num_bytes: int) -> None:
        if num_bytes > len(self._data) - self.position:
            raise StartupError(
                f"{self._path} is cut off: the header goes on past the end at byte {len(self._data)}; fetch it again"
            )

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes)
        start = self.position
        self.position += num_bytes
        return self._data[start : self.position]

    def scalar(self, layout: str) -> int:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        raw = self.take(self.scalar("<Q"))
        # Vocabularies may hold pieces that are no valid UTF-8; they must not stop the rest from being read.
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        return self._scalars(kind, 1)[0]

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == STRING:
            self.require(count * 8)
            return [self.string() for _ in range(count)]
        if kind == ARRAY:
            raise self.damaged("metadata holds an array of arrays")
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise self.damaged(f"metadata has a value of unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape in numpy order, type, offset into the data section)"""
        name = self.string()
        num_dims = self.scalar("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.damaged(f"tensor {name!r} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        if 0 in dims:
            raise self.damaged(f"tensor {name!r} has an empty dimension")
        return name, dims[::-1], self.scalar("<I"), self.scalar("<Q")

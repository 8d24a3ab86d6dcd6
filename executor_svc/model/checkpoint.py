"""Safetensors files of a model directory: every header checked before a single tensor is touched.

Knows names, shapes and types; not what a tensor is for. Shapes are multiplied as Python ints and compared with the byte
ranges of the header and the size of the file, so no number of a hostile or truncated file reaches an allocation.
"""

import json
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from executor_svc.errors import StartupError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100 << 20
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_ITEM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_ARRAYS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}  # elements.py says why
INT32 = frozenset({"I32"})
FLOAT8 = frozenset({"F8_E4M3"})


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # in the file
    num_bytes: int


class Checkpoint:
    """The tensors of a model directory by name; remembers which were taken."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.entries: dict[str, TensorEntry] = {}
        for file in _shards(self.directory):
            self.entries.update(_read_header(file))
        self._files: dict[Path, Any] = {}  # safe_open
        self._maps: dict[Path, mmap.mmap] = {}
        self._taken: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, StartupError when there is none."""
        if name not in self.entries:
            raise StartupError(f"{self.directory}: the checkpoint lacks tensor {name!r}; is the download complete?")
        return self.entries[name].shape

    def kind(self, name: str) -> str | None:
        """Type of tensor `name` as safetensors calls it, None where there is no such tensor."""
        return self.entries[name].dtype if name in self.entries else None

    def was_taken(self, name: str) -> bool:
        """Has somebody asked for tensor `name`?"""
        return name in self._taken

    def take(self, name: str, shape: tuple[int, ...], kinds: frozenset[str] = FLOATS) -> "torch.Tensor":
        """Tensor `name` as stored, which must have exactly `shape` and one of the types `kinds`."""
        from safetensors import SafetensorError, safe_open

        entry = self._taken_entry(name, shape, kinds)
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(entry.file, framework="pt")
            return self._files[entry.file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise _unreadable(name, entry, error) from None

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Floating-point tensor `name`, which must have exactly `shape`: the mapping of its file, read-only."""
        entry = self._taken_entry(name, shape, FLOATS)
        kind = np.dtype(_ARRAYS[entry.dtype])
        try:
            if entry.file not in self._maps:
                with entry.file.open("rb") as stream:
                    self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            octets = np.frombuffer(self._maps[entry.file], np.uint8, entry.num_bytes, entry.begin)
        except (OSError, ValueError) as error:
            raise _unreadable(name, entry, error) from None
        # A header of any length may stand before it, and the engine reads whole elements.
        if entry.begin % kind.itemsize:
            octets = octets.copy()
        return octets.view(kind).reshape(shape)

    def _taken_entry(self, name: str, shape: tuple[int, ...], kinds: frozenset[str]) -> TensorEntry:
        found = self.shape(name)
        entry = self.entries[name]
        if found != shape:
            raise StartupError(
                f"{entry.file}: tensor {name!r} has shape {list(found)}; config.json implies {list(shape)}"
            )
        if entry.dtype not in kinds:
            explained = "which no quantization_config of config.json explains" if kinds is FLOATS else "not as"
            expected = "" if kinds is FLOATS else f" {' or '.join(sorted(kinds))}"
            raise StartupError(f"{entry.file}: tensor {name!r} is stored as {entry.dtype}, {explained}{expected}")
        self._taken.add(name)
        return entry

    def require_all_taken(self, may_ignore: Callable[[str], bool]) -> None:
        """A tensor nobody asked for means the model is not the one its config names."""
        left = sorted(name for name in self.entries if name not in self._taken and not may_ignore(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise StartupError(
                f"{self.directory}: tensor {left[0]!r}{more} does not belong to the architecture of config.json"
            )

    def close(self) -> None:
        """Let go of the files."""
        self._files.clear()
        self._maps.clear()


def _unreadable(name: str, entry: TensorEntry, error: Exception) -> StartupError:
    return StartupError(f"{entry.file}: tensor {name!r} cannot be read: {error}")


def _shards(directory: Path) -> list[Path]:
    """The safetensors files of the model, all of which exist."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise StartupError(f"{directory} holds neither model.safetensors nor its index: only safetensors are loaded")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} cannot be read: {error!r}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise StartupError(f"{index} names {name!r}; shards must lie beside it")
        if not (directory / name).is_file():
            raise StartupError(f"{index} names {name}, which is missing; is the download complete?")
    return [directory / name for name in names]


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """The entries of one safetensors file, checked against its size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise StartupError(f"{file} is truncated or not a safetensors file")
            header = json.loads(stream.read(length))
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        entries = {name: _entry(file, name, item, 8 + length) for name, item in tensors.items()}
        end = 0
        for begin, following in sorted(item["data_offsets"] for item in tensors.values()):
            if begin != end:
                raise ValueError("tensors that overlap, or leave a gap")
            end = following
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise StartupError(f"{file} has a damaged header: {error!r}") from None
    if 8 + length + end != size:
        raise StartupError(
            f"{file} has {size} bytes where its header implies {8 + length + end}; is the download complete?"
        )
    return entries


def _entry(file: Path, name: str, item: dict, data_begin: int) -> TensorEntry:
    shape = tuple(item["shape"])
    begin, end = item["data_offsets"]
    if item["dtype"] not in _ITEM_BYTES:
        raise StartupError(f"{file}: tensor {name!r} has unknown type {item['dtype']!r}")
    num_bytes = _ITEM_BYTES[item["dtype"]]
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 0:
            raise ValueError(f"shape of {name!r}")
        num_bytes *= extent
    if begin < 0 or end - begin != num_bytes:
        raise ValueError(f"byte range of {name!r}")
    return TensorEntry(file, item["dtype"], shape, data_begin + begin, num_bytes)

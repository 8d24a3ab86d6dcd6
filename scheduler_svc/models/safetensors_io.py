"""Safetensors files: a writer that streams tensor by tensor, and a check that costs one small read.

The safetensors package writes whole dictionaries from memory and numpy has no bfloat16, so the writer works on raw
bytes: memory stays at one chunk whatever the model's size. Layout: header length u64, JSON header padded with spaces
to 8 bytes, tensor data without gaps.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler_svc.errors import StartupError

if TYPE_CHECKING:
    import numpy as np

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`chunks()` yields arrays whose bytes, one after the other, are the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: "Callable[[], Iterable[np.ndarray]]"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def write_safetensors(path: Path, tensors: list[TensorSpec], advance: Callable[[int], None]) -> str:
    """Writes and flushes to disk; returns the file's sha256. `advance` hears of each chunk's bytes."""
    # Serve asks this module about a model at every start, and writes one once.
    import numpy as np

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in (struct.pack("<Q", len(encoded)), encoded):
            file.write(part)
            digest.update(part)
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks():
                view = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
                file.write(view)
                digest.update(view)
                written += view.nbytes
                advance(view.nbytes)
            assert written == tensor.num_bytes, (tensor.name, written, tensor.num_bytes)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def check_safetensors(path: Path) -> None:
    """Raises StartupError unless the header is sound and the file exactly as long as it says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise StartupError(f"{path} is cut off or no safetensors file: fetch it again")
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise StartupError(f"{path} has a damaged safetensors header: fetch it again") from None
    if size != expected:
        raise StartupError(f"{path} has {size} bytes where its header says {expected}: fetch it again")

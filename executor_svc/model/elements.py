"""Element types by their names, and numpy arrays of them: what a loader needs of bfloat16, which numpy has not.

An array of uint16 holds bfloat16, as its bits: no checkpoint has unsigned 16-bit integers where a parameter may be.
Knows no model, and no torch: importing that takes longer than all the rest of a start.
"""

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
BITS_OF_BFLOAT16 = np.dtype(np.uint16)
_AT_ONCE = 1 << 16  # elements: what lies between two types stays in the cache


def name_of(dtype: object) -> str:
    """float32 for "float32" and for torch.float32."""
    return str(dtype).removeprefix("torch.")


def array_type(name: str) -> np.dtype:
    """How numpy holds elements of the type `name`."""
    return BITS_OF_BFLOAT16 if name == "bfloat16" else np.dtype(name)


def widened(array: np.ndarray) -> np.ndarray:
    """The same numbers in float32, a copy."""
    if array.dtype != BITS_OF_BFLOAT16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16, ties to even, a copy."""
    if array.dtype == BITS_OF_BFLOAT16:
        return array.copy()
    result = np.empty(array.shape, BITS_OF_BFLOAT16)
    source, target = np.ascontiguousarray(array).reshape(-1), result.reshape(-1)
    for first in range(0, source.size, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        wide = source[part].astype(np.float32, copy=False)
        bits = wide.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        target[part] = rounded
        if np.isnan(wide.max()):
            target[part][np.isnan(wide)] = 0x7FC0
    return result

"""The nouns every attention kernel shares: where keys and values live, and what is computed with them.

Letters: T tokens of a step, B sequences of a step, R rows, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head
size, N blocks, S tokens of a block (`block_size`).
"""

from dataclasses import dataclass

import torch

# Splits are a constant of the engine, never of a batch: what one row computes must not depend on its neighbours.
SPLIT = 256

# Largest magnitude a quantised key or value is scaled to.
QUANT_LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@dataclass(frozen=True)
class PagedKV:
    """One layer's keys and values.

    `cache`  [N, 2, S, Hkv, D] contiguous; index 0 of the second axis is keys, 1 is values.
    `scale`  [N, 2, Hkv, S] float32, one per stored head vector, for a cache of one-byte elements; None otherwise.
             A stored vector x stands for x * scale.
    """

    cache: torch.Tensor
    scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check the layout once, at the door: kernels take every stride from the shape."""
        num_blocks, two, block_size, num_kv_heads, _ = self.cache.shape
        if two != 2 or not self.cache.is_contiguous():
            raise ValueError(f"cache must be contiguous [N, 2, S, Hkv, D], got {tuple(self.cache.shape)}")
        if (self.cache.element_size() == 1) != (self.scale is not None):
            raise ValueError(f"a {self.cache.dtype} cache {'needs' if self.scale is None else 'has no'} scales")
        if self.scale is not None:
            expected = (num_blocks, 2, num_kv_heads, block_size)
            if self.scale.shape != expected or self.scale.dtype != torch.float32 or not self.scale.is_contiguous():
                raise ValueError(f"scale must be contiguous float32 {expected}, got {tuple(self.scale.shape)}")

    @property
    def is_quantised(self) -> bool:
        return self.scale is not None

    @property
    def block_size(self) -> int:
        return self.cache.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.cache.shape[3]

    @property
    def head_size(self) -> int:
        return self.cache.shape[4]

    @staticmethod
    def empty(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str) -> "PagedKV":
        """Allocate for `shape` = (N, S, Hkv, D); contents are whatever the memory held."""
        num_blocks, block_size, num_kv_heads, head_size = shape
        cache = torch.empty((num_blocks, 2, block_size, num_kv_heads, head_size), dtype=dtype, device=device)
        if dtype not in QUANT_LIMIT:
            return PagedKV(cache)
        scale = torch.empty((num_blocks, 2, num_kv_heads, block_size), dtype=torch.float32, device=device)
        return PagedKV(cache, scale)


@dataclass(frozen=True)
class AttentionSpec:
    """What attention means for a layer: softmax(softcap(scale * q k^T) masked to the window) v.

    `window` 0 sees everything; W sees the W newest tokens, itself included. `softcap` 0 is off; c maps x to
    c*tanh(x/c).
    """

    scale: float
    window: int = 0
    softcap: float = 0.0

"""The paged KV cache: per layer, K and V for every block. Allocated once, never resized; knows nothing of sequences.

layers[l] = (k, v), each [num_blocks, num_kv_heads, block_size, head_dim], contiguous
"""

from typing import Protocol

import numpy as np
import torch

ALIGNMENT = 64  # bytes: one cache line, one AVX-512 register


class KVShape(Protocol):
    """What the pool needs of a model's config."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVPool:
    def __init__(self, config: KVShape, num_blocks: int, block_size: int, dtype: torch.dtype):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        size = num_blocks * self.bytes_per_block(config, block_size, dtype) // (2 * config.num_layers)
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        # calloc: the system hands out a zeroed page when it is first written, so a large pool costs what is used of it.
        memory = np.zeros(stride * 2 * config.num_layers + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT

        def tensor(index: int) -> torch.Tensor:
            begin = start + index * stride
            return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(shape)

        self.layers = [(tensor(2 * layer), tensor(2 * layer + 1)) for layer in range(config.num_layers)]

    @staticmethod
    def bytes_per_block(config: KVShape, block_size: int, dtype: torch.dtype) -> int:
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """int32 [N, 2] of (source, destination); no destination is another's source or destination."""
        sources, destinations = torch.from_numpy(pairs.T.astype(np.int64))
        for k, v in self.layers:
            k[destinations] = k[sources]
            v[destinations] = v[sources]

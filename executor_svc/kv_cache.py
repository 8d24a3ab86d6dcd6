"""The paged KV cache: per layer, K and V for every block. Allocated once, never resized; knows nothing of sequences.

pages[l] = (k, v), each [num_blocks, num_kv_heads, block_size, head_dim], contiguous; layers[l] the same as tensors
"""

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from executor_svc.model.elements import ITEM_BYTES, array_type

if TYPE_CHECKING:
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
    def __init__(self, config: KVShape, num_blocks: int, block_size: int, dtype: str):
        """dtype: the name of a float type."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        size = num_blocks * self.bytes_per_block(config, block_size, dtype) // (2 * config.num_layers)
        stride = -(-size // ALIGNMENT) * ALIGNMENT
        # calloc: the system hands out a zeroed page when it is first written, so a large pool costs what is used of it.
        memory = np.zeros(stride * 2 * config.num_layers + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT

        def array(index: int) -> np.ndarray:
            begin = start + index * stride
            return memory[begin : begin + size].view(array_type(dtype)).reshape(shape)

        self.pages = [(array(2 * layer), array(2 * layer + 1)) for layer in range(config.num_layers)]

    @cached_property
    def layers(self) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """The same memory, for decoders that compute in torch."""
        from executor_svc.model.tensors import tensors

        return [(tensors(k), tensors(v)) for k, v in self.pages]

    @staticmethod
    def bytes_per_block(config: KVShape, block_size: int, dtype: str) -> int:
        return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * ITEM_BYTES[dtype]

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """int32 [N, 2] of (source, destination); no destination is another's source or destination."""
        sources, destinations = pairs.T.astype(np.int64)
        for k, v in self.pages:
            k[destinations] = k[sources]
            v[destinations] = v[sources]

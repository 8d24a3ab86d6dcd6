"""Copies whole blocks within a cache: what a fork of a sequence costs."""

import torch
import triton
import triton.language as tl

from kernels.paged import PagedKV

# Bytes that a program moves in one turn.
CHUNK = 4096


@triton.jit
def copy_blocks_kernel(cache_ptr, pairs_ptr, BYTES: tl.constexpr, CHUNK: tl.constexpr):
    """Program (i, j): chunk j of pair i, as 32-bit words."""
    WORDS: tl.constexpr = BYTES // 4
    source = tl.load(pairs_ptr + 2 * tl.program_id(0)).to(tl.int64)
    destination = tl.load(pairs_ptr + 2 * tl.program_id(0) + 1).to(tl.int64)
    word = tl.program_id(1) * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    data = tl.load(cache_ptr + source * WORDS + word, mask=word < WORDS)
    tl.store(cache_ptr + destination * WORDS + word, data, mask=word < WORDS)


@torch.no_grad()
def copy_blocks(kv: PagedKV, pairs: torch.Tensor) -> None:
    """Copy block pairs[i, 0] to block pairs[i, 1] of one layer; int32 [n, 2] on the device.

    No block may be both a source and a destination: the pairs of a step are copied at once.
    """
    if len(pairs) == 0:
        return
    for tensor in (kv.cache, kv.scale):
        if tensor is not None:
            # One block's bytes, whatever the type; a multiple of 4 by any block and head size in use.
            size = tensor[0].numel() * tensor.element_size()
            words = tensor.view(torch.uint8).view(-1).view(torch.int32)
            copy_blocks_kernel[(len(pairs), triton.cdiv(size, CHUNK))](
                words, pairs, BYTES=size, CHUNK=CHUNK, num_warps=4
            )

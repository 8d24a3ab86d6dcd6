"""Attention of many new tokens per sequence over a paged cache.

    out[t] = softmax(scale * q[t] K[:pos(t)+1]^T) V[:pos(t)+1]

One kernel serves prefill, chunked prefill, prefix hits and mixed batches: a sequence has `q_len` new tokens at the
end of `seq_len` known ones, whose keys and values are in the cache already. A program owns BLOCK_M rows = (BLOCK_Q
tokens) x (G query heads of one kv head), so each key is read once for the whole group; G need not divide BLOCK_M, the
remainder idles.

Invariant: a query folds tiles [0, TILE), [TILE, 2 TILE), ... in order whatever the chunk or the batch around it;
tiles it does not see add exactly nothing. So its result does not depend on either, bit for bit.
"""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.attention_tile import attend_tile
from kernels.configs import AttentionConfig, attention_config
from kernels.paged import AttentionSpec, PagedKV


# Tables and lengths may begin anywhere (the part of a step behind its decodes): no alignment is assumed of them.
@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr"])
def prefill_kernel(
    q_ptr,
    kv_ptr,
    scale_ptr,
    out_ptr,
    table_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    work_ptr,
    stride_q,
    stride_out,
    stride_table,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTISED: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    S: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Program (i, h): the BLOCK_Q tokens of work item i under kv head h."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    head = tl.program_id(1)
    seq = tl.load(work_ptr + 2 * tl.program_id(0))
    first = tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    q_begin = tl.load(cu_seqlens_ptr + seq)
    q_len = tl.load(cu_seqlens_ptr + seq + 1) - q_begin
    seq_len = tl.load(seq_lens_ptr + seq)
    first_pos = seq_len - q_len + first

    # -- load queries: row r is token r // G, query head r % G --
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D_PAD)
    token = row // G
    live = (token < BLOCK_Q) & (first + token < q_len)
    q_pos = tl.where(live, first_pos + token, -1)
    at = (q_begin + first + token).to(tl.int64)
    inside = live[:, None] & (dim < D)[None, :]
    in_token = ((head * G + row % G) * D)[:, None] + dim[None, :]
    q = tl.load(q_ptr + at[:, None] * stride_q + in_token, mask=inside, other=0.0)

    # -- fold tiles: [first_tile, full) are seen by every query whole, [full, end) need masks --
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    end = tl.minimum(first_pos + BLOCK_Q, seq_len)
    row_table = table_ptr + seq.to(tl.int64) * stride_table
    full = 0
    if WINDOW > 0:
        full = tl.maximum(first_pos - WINDOW + 1, 0) // TILE * TILE
    else:
        full = (first_pos + 1) // TILE * TILE
        for start in range(0, full, TILE):
            acc, m, total = attend_tile(
                q, acc, m, total, kv_ptr, scale_ptr, row_table, head, start, seq_len, q_pos, scale,
                SOFTCAP, WINDOW, False, QUANTISED, TILE, S, HKV, D, D_PAD,
            )  # fmt: skip
    for start in range(full, end, TILE):
        acc, m, total = attend_tile(
            q, acc, m, total, kv_ptr, scale_ptr, row_table, head, start, seq_len, q_pos, scale,
            SOFTCAP, WINDOW, True, QUANTISED, TILE, S, HKV, D, D_PAD,
        )  # fmt: skip

    # -- store --
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + at[:, None] * stride_out + in_token, out.to(out_ptr.dtype.element_ty), mask=inside)


def plan_prefill(cu_seqlens: np.ndarray, seq_lens: np.ndarray, block_q: int) -> np.ndarray:
    """Cut a step's queries into work items, once per step: int32 [num_items, 2] of (sequence, first query of it).

    Longest contexts come first, so that the last programs to start are the short ones.
    """
    q_lens = np.diff(cu_seqlens)
    counts = -(-q_lens // block_q)
    seq = np.repeat(np.arange(len(q_lens)), counts)
    index = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = index * block_q
    context = seq_lens[seq] - q_lens[seq] + first
    order = np.argsort(-context, kind="stable")
    return np.stack([seq[order], first[order]], axis=1).astype(np.int32)


def block_q_for(q_heads: int, kv: PagedKV) -> int:
    """Tokens of one work item on this device, for `plan_prefill`."""
    return attention_config("prefill", kv.head_size, kv.cache.dtype).block_m // (q_heads // kv.num_kv_heads)


@torch.no_grad()
def prefill_attention(
    q: torch.Tensor,
    kv: PagedKV,
    spec: AttentionSpec,
    *,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    work: torch.Tensor,
    out: torch.Tensor,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attend from the new tokens of each sequence to all its tokens up to themselves.

    q            [T, Hq, D] bf16, fp16 or fp32; heads and dims contiguous, tokens may be strided
    kv           the layer's cache; the new tokens' keys and values are in it
    block_table  int32 [B, max_blocks]; entries past a sequence's length are never read
    cu_seqlens   int32 [B + 1]; the queries of sequence b are rows [cu_seqlens[b], cu_seqlens[b+1]) of q
    seq_lens     int32 [B]; tokens known, the new ones included
    work         int32 [num_items, 2] of `plan_prefill`, made for the same config
    out          [T, Hq, D] like q; only rows of live queries are written
    """
    _, q_heads, head_size = q.shape
    group = q_heads // kv.num_kv_heads
    config = config or attention_config("prefill", head_size, kv.cache.dtype)
    if len(work) == 0:
        return out
    prefill_kernel[(len(work), kv.num_kv_heads)](
        q,
        kv.cache,
        kv.scale if kv.scale is not None else q,
        out,
        block_table,
        cu_seqlens,
        seq_lens,
        work,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        spec.scale,
        SOFTCAP=spec.softcap,
        WINDOW=spec.window,
        QUANTISED=kv.is_quantised,
        G=group,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        S=kv.block_size,
        HKV=kv.num_kv_heads,
        D=head_size,
        D_PAD=max(16, triton.next_power_of_2(head_size)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out

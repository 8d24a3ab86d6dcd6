"""Attention of one new token per sequence over a paged cache, cut along the context so that few sequences fill the
device.

    split s of a row:  o_s = softmax(x_s) V_s,   lse_s = log2 sum_j 2^(x_sj)      over its SPLIT tokens
    combine:           out = sum_s 2^(lse_s - lse) o_s,   lse = log2 sum_s 2^(lse_s)      in ascending s

Invariant: the cuts lie at multiples of SPLIT of the row's own context, and the combination runs in a fixed order. So
a row's result is the same bits alone, in any batch, in any padding.
"""

import torch
import triton
import triton.language as tl

from kernels.attention_tile import attend_tile
from kernels.configs import AttentionConfig, attention_config
from kernels.paged import SPLIT, AttentionSpec, PagedKV

# Splits merged by one step of the combination; fixed, for the same reason as SPLIT.
MERGE = 16


@triton.jit(do_not_specialize=["stride_table", "max_splits"])
def decode_split_kernel(
    q_ptr,
    kv_ptr,
    scale_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    seq_lens_ptr,
    shared_ptr,
    stride_q,
    stride_out,
    stride_table,
    max_splits,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUANTISED: tl.constexpr,
    DIRECT: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    S: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Program (b, h, s): split s of sequence b under kv head h. DIRECT: there is one split, write the result itself."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + seq)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, seq_len)
    if WINDOW > 0:
        begin = tl.maximum(begin, tl.maximum(seq_len - WINDOW, 0) // TILE * TILE)
    if not DIRECT:
        # Nothing to see in this split; the combination knows, and does not read it.
        if begin >= end:
            return
        if HAS_SHARED and split < tl.load(shared_ptr + seq):
            return

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D_PAD)
    inside = (row < G)[:, None] & (dim < D)[None, :]
    in_token = ((head * G + row) * D)[:, None] + dim[None, :]
    q = tl.load(q_ptr + seq.to(tl.int64) * stride_q + in_token, mask=inside, other=0.0)
    # Idle rows ask with q = 0: cheaper than a mask, and never stored.
    q_pos = tl.full([BLOCK_M], 0, tl.int32) + seq_len - 1

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    row_table = table_ptr + seq.to(tl.int64) * stride_table
    full = begin
    if WINDOW == 0:
        full = end // TILE * TILE
        for start in range(begin, full, TILE):
            acc, m, total = attend_tile(
                q, acc, m, total, kv_ptr, scale_ptr, row_table, head, start, seq_len, q_pos, scale,
                SOFTCAP, WINDOW, False, QUANTISED, TILE, S, HKV, D, D_PAD,
            )  # fmt: skip
    for start in range(full, end, TILE):
        acc, m, total = attend_tile(
            q, acc, m, total, kv_ptr, scale_ptr, row_table, head, start, seq_len, q_pos, scale,
            SOFTCAP, WINDOW, True, QUANTISED, TILE, S, HKV, D, D_PAD,
        )  # fmt: skip

    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    if DIRECT:
        tl.store(out_ptr + seq.to(tl.int64) * stride_out + in_token, out.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # Partials lie [B, Hq, max_splits, D], their lse [B, Hq, max_splits].
        place = (seq.to(tl.int64) * (HKV * G) + head * G + row) * max_splits + split
        tl.store(partial_ptr + place[:, None] * D + dim[None, :], out, mask=inside)
        tl.store(lse_ptr + place, m + tl.log2(total), mask=row < G)


@triton.jit(do_not_specialize=["max_splits"])
def decode_combine_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    seq_lens_ptr,
    stride_out,
    max_splits,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Program (b, h): merge the splits of sequence b under query head h, MERGE at a time, in order."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    num_splits = (seq_len + SPLIT - 1) // SPLIT
    first_split = 0
    if WINDOW > 0:
        # The first split that wrote anything, by the rule of the kernel above.
        first_split = tl.maximum(seq_len - WINDOW, 0) // TILE * TILE // SPLIT

    dim = tl.arange(0, D_PAD)
    place = (seq.to(tl.int64) * HQ + head) * max_splits
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([D_PAD], tl.float32)
    for start in range(first_split, num_splits, MERGE):
        split = start + tl.arange(0, MERGE)
        lse = tl.load(lse_ptr + place + split, mask=split < num_splits, other=float("-inf"))
        inside = (split < num_splits)[:, None] & (dim < D)[None, :]
        part = tl.load(partial_ptr + (place + split)[:, None] * D + dim[None, :], mask=inside, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        # Every split from the first has seen a token, so m_new is finite and 2^(-inf - m_new) is a clean 0.
        weight = tl.exp2(lse - m_new)
        decay = tl.exp2(m - m_new)
        acc = acc * decay + tl.sum(weight[:, None] * part, 0)
        total = total * decay + tl.sum(weight, 0)
        m = m_new
    out = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + seq.to(tl.int64) * stride_out + head * D + dim, out.to(out_ptr.dtype.element_ty), mask=dim < D)


def combine_warps(head_pad: int) -> int:
    """Sixteen bytes for each thread of a merge of MERGE head vectors."""
    return max(1, min(8, MERGE * head_pad // 4 // 32))


class DecodeWorkspace:
    """Room for the partial results of a decode step: [B, Hq, max_splits, D] and [B, Hq, max_splits], float32.

    One serves all layers: a step runs them one after the other.
    """

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device | str) -> None:
        """`shape` = (most sequences, Hq, most splits, D)."""
        self.partial = torch.empty(shape, dtype=torch.float32, device=device)
        self.lse = torch.empty(shape[:3], dtype=torch.float32, device=device)


def num_splits(max_seq_len: int) -> int:
    """Splits that a context of `max_seq_len` tokens has; the third grid axis of a decode step."""
    return max(1, -(-max_seq_len // SPLIT))


@torch.no_grad()
def decode_attention(
    q: torch.Tensor,
    kv: PagedKV,
    spec: AttentionSpec,
    *,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_splits: int,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    num_shared_splits: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Attend from one new token of each sequence to all its tokens.

    q            [B, Hq, D]; heads and dims contiguous, rows may be strided
    block_table  int32 [B, max_blocks]; entries past a sequence's length are never read
    seq_lens     int32 [B]; tokens known, the new one included. 0 is padding: its output is zeros
    max_splits   at least num_splits(max(seq_lens)); changing it changes no bit of the result
    workspace    at least B rows and max_splits splits (unused when max_splits is 1)
    out          [B, Hq, D]
    num_shared_splits  int32 [B]: that many first splits are in the workspace already (`shared_prefix_attention`)
    """
    batch, q_heads, head_size = q.shape
    group = q_heads // kv.num_kv_heads
    config = config or attention_config("decode", head_size, kv.cache.dtype)
    direct = max_splits == 1
    head_pad = max(16, triton.next_power_of_2(head_size))
    partial, lse = workspace.partial, workspace.lse
    if not direct and (partial.shape[0] < batch or partial.shape[2] < max_splits or partial.shape[3] != head_size):
        raise ValueError(f"workspace {tuple(partial.shape)} is too small for {batch} rows of {max_splits} splits")
    decode_split_kernel[(batch, kv.num_kv_heads, max_splits)](
        q,
        kv.cache,
        kv.scale if kv.scale is not None else q,
        out,
        partial,
        lse,
        block_table,
        seq_lens,
        num_shared_splits if num_shared_splits is not None else seq_lens,
        q.stride(0),
        out.stride(0),
        block_table.stride(0),
        partial.shape[2],
        spec.scale,
        SOFTCAP=spec.softcap,
        WINDOW=spec.window,
        QUANTISED=kv.is_quantised,
        DIRECT=direct,
        HAS_SHARED=num_shared_splits is not None,
        G=group,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        TILE=config.tile,
        SPLIT=SPLIT,
        S=kv.block_size,
        HKV=kv.num_kv_heads,
        D=head_size,
        D_PAD=head_pad,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if direct:
        return out
    decode_combine_kernel[(batch, q_heads)](
        partial,
        lse,
        out,
        seq_lens,
        out.stride(0),
        partial.shape[2],
        WINDOW=spec.window,
        TILE=config.tile,
        SPLIT=SPLIT,
        MERGE=MERGE,
        HQ=q_heads,
        D=head_size,
        D_PAD=head_pad,
        num_warps=combine_warps(head_pad),
    )
    return out

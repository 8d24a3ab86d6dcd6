"""Decode attention over a prefix that many rows share, so that it is read once for all of them (cascade attention).

Rows of a group own the same blocks for their first P splits. Here a program folds one of those splits for BLOCK_M
query rows = (BLOCK_R sequences) x (G heads) at once and leaves (o_s, lse_s) exactly where `decode_split_kernel` would
have left them; that kernel then skips the splits (`num_shared_splits`), and the combination does not know the
difference.

Invariant: a shared split folds the same tiles in the same order as a lone row would. So sharing is an optimisation that
the result does not show, up to the rounding of a matrix product of another height.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.attention_decode import DecodeWorkspace
from kernels.attention_tile import attend_tile
from kernels.configs import AttentionConfig, attention_config
from kernels.paged import SPLIT, AttentionSpec, PagedKV

# Below these it is not worth a launch.
MIN_ROWS = 8
MIN_TOKENS = 1024


@triton.jit(do_not_specialize=["stride_table", "max_splits"])
def shared_split_kernel(
    q_ptr,
    kv_ptr,
    scale_ptr,
    partial_ptr,
    lse_ptr,
    table_ptr,
    members_ptr,
    work_ptr,
    stride_q,
    stride_table,
    max_splits,
    scale,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
    G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    S: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Program (i, h): work item i = (split, first member, members) under kv head h."""
    head = tl.program_id(1)
    split = tl.load(work_ptr + 3 * tl.program_id(0))
    first = tl.load(work_ptr + 3 * tl.program_id(0) + 1)
    num_members = tl.load(work_ptr + 3 * tl.program_id(0) + 2)

    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, D_PAD)
    live = row // G < num_members
    seq = tl.load(members_ptr + first + row // G, mask=live, other=0).to(tl.int64)
    inside = live[:, None] & (dim < D)[None, :]
    in_token = ((head * G + row % G) * D)[:, None] + dim[None, :]
    q = tl.load(q_ptr + seq[:, None] * stride_q + in_token, mask=inside, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    # Any member's table will do: they agree on these blocks.
    row_table = table_ptr + tl.load(members_ptr + first).to(tl.int64) * stride_table
    end = split * SPLIT + SPLIT
    for start in range(split * SPLIT, end, TILE):
        acc, m, total = attend_tile(
            q, acc, m, total, kv_ptr, scale_ptr, row_table, head, start, end, row, scale,
            SOFTCAP, 0, False, QUANTISED, TILE, S, HKV, D, D_PAD,
        )  # fmt: skip
    place = (seq * (HKV * G) + head * G + row % G) * max_splits + split
    tl.store(partial_ptr + place[:, None] * D + dim[None, :], acc / total[:, None], mask=inside)
    tl.store(lse_ptr + place, m + tl.log2(total), mask=live)


@dataclass(frozen=True)
class SharedPlan:
    """Which splits are computed once for whom. All int32.

    `members` [sum of group sizes] sequences, group after group; `work` [items, 3] of (split, first member, members);
    `num_shared_splits` [B], 0 for who shares nothing.
    """

    members: np.ndarray
    work: np.ndarray
    num_shared_splits: np.ndarray

    @property
    def saved_tokens(self) -> int:
        """Keys and values that are not read again, in tokens of one layer."""
        read_once = SPLIT * len(self.work)
        return SPLIT * int(self.num_shared_splits.sum()) - read_once


def plan_shared(tables: np.ndarray, seq_lens: np.ndarray, block_size: int, rows_per_item: int) -> SharedPlan | None:
    """Group sequences that own the same leading blocks; None when nothing is worth sharing.

    Only whole splits are shared, and never a sequence's last token: it is in its own split.
    """
    blocks_per_split = SPLIT // block_size
    min_splits = -(-MIN_TOKENS // SPLIT)
    whole = np.maximum(seq_lens - 1, 0) // SPLIT
    candidates = np.flatnonzero(whole >= min_splits)
    if len(candidates) < MIN_ROWS:
        return None
    # Sequences that agree on the shortest worthwhile prefix are a group.
    heads = tables[candidates, : min_splits * blocks_per_split]
    _, label = np.unique(heads, axis=0, return_inverse=True)
    shared = np.zeros(len(seq_lens), np.int32)
    members: list[int] = []
    work: list[tuple[int, int, int]] = []
    for group in range(label.max() + 1):
        rows = candidates[label.ravel() == group]
        if len(rows) < MIN_ROWS:
            continue
        limit = int(whole[rows].min())
        prefix = tables[rows, : limit * blocks_per_split]
        same = (prefix == prefix[0]).all(axis=0).reshape(limit, blocks_per_split).all(axis=1)
        splits = int(same.cumprod().sum())
        shared[rows] = splits
        for begin in range(0, len(rows), rows_per_item):
            size = min(rows_per_item, len(rows) - begin)
            work += [(split, len(members) + begin, size) for split in range(splits)]
        members += rows.tolist()
    if not work:
        return None
    return SharedPlan(np.array(members, np.int32), np.array(work, np.int32), shared)


def rows_per_item(group: int, kv: PagedKV) -> int:
    """Sequences of one work item on this device, for `plan_shared`."""
    return attention_config("shared", kv.head_size, kv.cache.dtype).block_m // group


@torch.no_grad()
def shared_prefix_attention(
    q: torch.Tensor,
    kv: PagedKV,
    spec: AttentionSpec,
    *,
    block_table: torch.Tensor,
    members: torch.Tensor,
    work: torch.Tensor,
    workspace: DecodeWorkspace,
    config: AttentionConfig | None = None,
) -> None:
    """Put the shared splits of a decode step into `workspace`; then run `decode_attention` with `num_shared_splits`.

    q [B, Hq, D] and block_table as for `decode_attention`; members and work are those of `plan_shared`, on the device.
    Not for layers with a window: their old splits are not attended to.
    """
    if spec.window:
        raise ValueError("layers with a window share no prefix splits")
    _, q_heads, head_size = q.shape
    config = config or attention_config("shared", head_size, kv.cache.dtype)
    shared_split_kernel[(len(work), kv.num_kv_heads)](
        q,
        kv.cache,
        kv.scale if kv.scale is not None else q,
        workspace.partial,
        workspace.lse,
        block_table,
        members,
        work,
        q.stride(0),
        block_table.stride(0),
        workspace.partial.shape[2],
        spec.scale,
        SOFTCAP=spec.softcap,
        QUANTISED=kv.is_quantised,
        G=q_heads // kv.num_kv_heads,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        SPLIT=SPLIT,
        S=kv.block_size,
        HKV=kv.num_kv_heads,
        D=head_size,
        D_PAD=max(16, triton.next_power_of_2(head_size)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

"""Rotary embedding, optional QK-norm and the write into the paged cache: all between the projection and attention.

    norm(x)  = x / sqrt(mean(x^2) + eps) * w            per head, queries and keys only
    rope(x)  = (x1 cos - x2 sin, x2 cos + x1 sin)       x1, x2 the halves of the first `rotary` dims; the rest passes
    quant(x) = round(x / s), s = max|x| / limit         per token and kv head, one-byte caches only

All in float32 between one load and one store.
"""

import torch
import triton
import triton.language as tl

from kernels.paged import QUANT_LIMIT, PagedKV


@triton.jit
def rope_cache_kernel(
    qkv_ptr,
    q_out_ptr,
    kv_ptr,
    scale_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    stride_qkv,
    eps,
    LIMIT: tl.constexpr,
    ROUND: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Program (t, i): heads [i * HEADS, (i + 1) * HEADS) of token t, counted q | k | v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, D_PAD)
    is_q = head < HQ
    is_v = head >= HQ + HKV
    inside = (head < HQ + 2 * HKV)[:, None] & (dim < D)[None, :]
    base = qkv_ptr + token * stride_qkv + (head * D)[:, None]
    x = tl.load(base + dim[None, :], mask=inside, other=0.0).to(tl.float32)

    # Rotation needs each dim's partner half a rotary width away: a second load, from the line just read.
    HALF: tl.constexpr = ROTARY // 2
    rotates = (dim < ROTARY)[None, :] & (head < HQ + HKV)[:, None]
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    y = tl.load(base + partner[None, :], mask=inside & rotates, other=0.0).to(tl.float32)
    if NORM:
        power = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
        wq = tl.load(q_weight_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)
        wk = tl.load(k_weight_ptr + dim, mask=dim < D, other=0.0).to(tl.float32)
        normed = x * power[:, None] * tl.where(is_q[:, None], wq[None, :], wk[None, :])
        x = tl.where(is_v[:, None], x, normed)
        pq = tl.load(q_weight_ptr + partner, mask=dim < ROTARY, other=0.0).to(tl.float32)
        pk = tl.load(k_weight_ptr + partner, mask=dim < ROTARY, other=0.0).to(tl.float32)
        y = y * power[:, None] * tl.where(is_q[:, None], pq[None, :], pk[None, :])
    if ROTARY > 0:
        # The table's row of a position is cos | sin, HALF each.
        angle = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY + dim % HALF
        cos = tl.load(angle, mask=dim < ROTARY, other=1.0)
        sin = tl.load(angle + HALF, mask=dim < ROTARY, other=0.0)
        sign = tl.where(dim < HALF, -1.0, 1.0)
        x = tl.where(rotates, x * cos[None, :] + y * (sin * sign)[None, :], x)

    q_row = q_out_ptr + token * (HQ * D) + (head * D)[:, None]
    tl.store(q_row + dim[None, :], x.to(q_out_ptr.dtype.element_ty), mask=inside & is_q[:, None])

    slot = tl.load(slots_ptr + token).to(tl.int64)
    # Padding tokens have slot -1 and are stored nowhere.
    kept = (head >= HQ) & (head < HQ + 2 * HKV) & (slot >= 0)
    kv_head = tl.where(is_v, head - HQ - HKV, head - HQ)
    side = (slot // S) * 2 + is_v.to(tl.int64)
    if LIMIT > 0:
        largest = tl.max(tl.abs(x), 1)
        step = tl.where(largest == 0, 1.0, largest / LIMIT)
        x = tl.minimum(tl.maximum(x / step[:, None], -LIMIT), LIMIT)
        if ROUND:
            x = tl.floor(x + 0.5)
        # Scales lie [N, 2, Hkv, S].
        tl.store(scale_ptr + (side * HKV + kv_head) * S + slot % S, step, mask=kept)
    # Vectors lie [N, 2, S, Hkv, D].
    vector = (side * S + slot % S) * HKV + kv_head
    tl.store(kv_ptr + vector[:, None] * D + dim[None, :], x.to(kv_ptr.dtype.element_ty), mask=inside & kept[:, None])


# Heads of one program.
HEADS = 4


def num_warps(head_size: int) -> int:
    """So many that each thread holds eight elements, 16 bytes."""
    return max(1, HEADS * triton.next_power_of_2(head_size) // 256)


def constants(shape: tuple[int, int, int, int], kv_dtype: torch.dtype, *, rotary: int, norm: bool) -> dict[str, object]:
    """What the kernel is compiled for; `shape` = (Hq, Hkv, D, S)."""
    q_heads, kv_heads, head_size, block_size = shape
    return {
        "LIMIT": QUANT_LIMIT.get(kv_dtype, 0.0),
        "ROUND": kv_dtype == torch.int8,
        "NORM": norm,
        "HEADS": HEADS,
        "HQ": q_heads,
        "HKV": kv_heads,
        "S": block_size,
        "D": head_size,
        "D_PAD": triton.next_power_of_2(head_size),
        "ROTARY": rotary,
    }


@torch.no_grad()
def rope_and_cache(
    qkv: torch.Tensor,
    kv: PagedKV,
    *,
    cos_sin: torch.Tensor | None,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values in their slots, return the queries.

    qkv        [T, (Hq + 2 Hkv) * D]: the fused projection, q | k | v; rows may be strided
    cos_sin    float32 [max_positions, rotary], cos | sin; rotary <= D and even. None rotates nothing
    positions  int32 [T]
    slots      int32 [T], block * S + offset; -1 stores nothing (padding)
    q_out      [T, Hq, D] contiguous
    norm       (q weight [D], k weight [D], eps) of a per-head RMS norm before the rotation
    """
    num_tokens, q_heads, head_size = q_out.shape
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    q_weight, k_weight, eps = norm if norm is not None else (qkv, qkv, 0.0)
    num_heads = q_heads + 2 * kv.num_kv_heads
    shape = (q_heads, kv.num_kv_heads, head_size, kv.block_size)
    rope_cache_kernel[(num_tokens, triton.cdiv(num_heads, HEADS))](
        qkv,
        q_out,
        kv.cache,
        kv.scale if kv.scale is not None else qkv,
        cos_sin if cos_sin is not None else qkv,
        positions,
        slots,
        q_weight,
        k_weight,
        qkv.stride(0),
        eps,
        **constants(shape, kv.cache.dtype, rotary=rotary, norm=norm is not None),
        num_warps=num_warps(head_size),
    )
    return q_out

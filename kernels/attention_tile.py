"""One step of online softmax over one tile of paged keys and values: the inner loop of every attention kernel.

With x = scale * q k^T in base-2 units (x * log2 e), and (m, t, acc) the running maximum, normaliser and weighted sum:

    m' = max(m, max_j x_j)      a = 2^(m - m')      p_j = 2^(x_j - m')
    t' = t * a + sum_j p_j      acc' = acc * a + p V

exp2 because it is one instruction where exp is two. Knows nothing of grids, sequences or outputs.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tile(
    q,
    acc,
    m,
    total,
    kv_ptr,
    scale_ptr,
    table_ptr,
    head,
    start,
    seq_len,
    q_pos,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    QUANTISED: tl.constexpr,
    TILE: tl.constexpr,
    S: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Fold tokens [start, start + TILE) of one sequence into (acc, m, total).

    q [M, D_PAD], q_pos [M] the queries' positions (-1: no query). MASKED False promises that every query sees every
    token of the tile. Slots past `seq_len` may hold anything, NaN included, and their table entries too: they are
    never read.
    """
    pos = start + tl.arange(0, TILE)
    dim = tl.arange(0, D_PAD)
    exists = pos < seq_len
    if MASKED:
        block = tl.load(table_ptr + pos // S, mask=exists, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + pos // S).to(tl.int64)
    # Head vectors lie [N, 2, S, Hkv]; a token's value is S * HKV vectors after its key.
    key = block * (2 * S * HKV) + (pos % S) * HKV + head
    k_ptrs = kv_ptr + key[None, :] * D + dim[:, None]
    v_ptrs = kv_ptr + (key[:, None] + S * HKV) * D + dim[None, :]
    if MASKED or D != D_PAD:
        k = tl.load(k_ptrs, mask=exists[None, :] & (dim < D)[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=exists[:, None] & (dim < D)[None, :], other=0.0)
    else:
        k = tl.load(k_ptrs)
        v = tl.load(v_ptrs)

    # float32 models want float32 products; "ieee" means nothing to the narrower types.
    x = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    if QUANTISED:
        # Scales lie [N, 2, Hkv, S].
        k_scale_ptrs = scale_ptr + (block * 2 * HKV + head) * S + pos % S
        x = x * tl.load(k_scale_ptrs, mask=exists, other=0.0)[None, :]
        v_scale = tl.load(k_scale_ptrs + HKV * S, mask=exists, other=0.0)
    if SOFTCAP > 0:
        # tanh(y) = 1 - 2 / (e^2y + 1)
        x = SOFTCAP * (1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E / SOFTCAP)) + 1.0))
    x = x * LOG2E
    if MASKED:
        seen = pos[None, :] <= q_pos[:, None]
        if WINDOW > 0:
            seen = seen & (q_pos[:, None] - pos[None, :] < WINDOW)
        x = tl.where(seen, x, float("-inf"))

    m_new = tl.maximum(m, tl.max(x, 1))
    # A query that has seen nothing yet keeps m = -inf; subtract 0 instead of making NaN of -inf - -inf.
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = tl.exp2(x - m_ref[:, None])
    decay = tl.exp2(m - m_ref)
    total = total * decay + tl.sum(p, 1)
    if QUANTISED:
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return acc, m_new, total

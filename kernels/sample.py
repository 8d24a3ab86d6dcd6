"""Draws a token per row without sorting and without state.

With x = logits / temperature and p = softmax(x), a token is kept when it passes all of

    min-p:  p >= min_p * max p,  that is  x >= max x + log min_p
    top-k:  x >= the k-th largest x of these                     ties with it are kept
    top-p:  x >= t, t the largest value with sum_{x >= t} p >= top_p * (mass of what top-k kept)

All three are thresholds on x, so drawing is one comparison per token and an exponential race (Gumbel's trick):

    token = argmax_v  x_v - log e_v,     e_v = -log(1 - u_v),     u_v = (bits(seed, choice, position, v) + 1/2) / 2^32

which follows p renormalised over the kept tokens. The noise depends on nothing but (seed, choice, position, token): not
on the row, the batch, a preemption or a restart. Temperature 0 is the argmax, lowest id on ties.

A threshold is found by bisection on integers that order as floats do, at most 32 halvings. Each reads all candidates,
so tokens that cannot matter are dropped first: of a few cuts below the maximum, the tightest that still holds k tokens,
or top_p of the mass, leaves those that are searched.
"""

import torch
import triton
import triton.language as tl

# Columns read at once, warps for them, and the most candidates that are copied aside; more are searched in place.
BLOCK = 8192
NUM_WARPS = 16
CANDIDATES = 8192
# -log e of the smallest u, 2^-33, is below this: a block that trails by more cannot win.
MAX_NOISE = tl.constexpr(22.9)


@triton.jit
def ordered(x):
    """Integers that compare as the floats do (no NaN)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unordered(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def mix64(x):
    """SplitMix64's finaliser."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mix32(x):
    """A permutation of 32 bits in which each input bit moves every output bit."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def draw_key(seed, choice, position):
    """uint64 of (seed, choice, position); the seed's bits come as int64."""
    key = mix64(seed.to(tl.uint64, bitcast=True))
    return mix64(mix64(key ^ choice.to(tl.uint64)) ^ position.to(tl.uint64))


@triton.jit
def race_noise(key, token):
    """-log e of each token. Small u are exact in float32, and they are the ones that win."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    scattered = mix32(token.to(tl.uint32, bitcast=True) * 0x9E3779B1)
    bits = mix32((scattered ^ low) * (high | 1))
    u = (bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    # log(1 - u) loses what matters when u is small; three terms of its series do not.
    late = -tl.log(tl.maximum(1.0 - u, 1e-30))
    e = tl.where(u < 0.0078125, u * (1.0 + u * (0.5 + u * 0.3333333333)), late)
    return -tl.log(e)


@triton.jit
def load_scaled(ptr, start, end, inverse_temperature, BLOCK: tl.constexpr):
    """x of columns [start, start + BLOCK), -inf from `end` on."""
    col = start + tl.arange(0, BLOCK)
    return tl.load(ptr + col, mask=col < end, other=float("-inf")).to(tl.float32) * inverse_temperature


@triton.jit
def above(ptr, length, inverse_temperature, top, threshold, BLOCK: tl.constexpr):
    """(how many, sum of e^(x - top)) of the x >= threshold."""
    count = 0
    mass = 0.0
    for start in range(0, length, BLOCK):
        x = load_scaled(ptr, start, length, inverse_temperature, BLOCK)
        kept = (x >= threshold) & (x > float("-inf"))
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(x - top), 0.0), 0)
    return count, mass


@triton.jit
def find_threshold(ptr, length, inverse_temperature, top, low, min_count, min_mass, BLOCK: tl.constexpr):
    """The largest t in [low, top] with min_count tokens and min_mass of mass at or above it; `low` has them."""
    lower = ordered(low).to(tl.int64)
    upper = ordered(top).to(tl.int64)
    while lower < upper:
        middle = (lower + upper + 1) >> 1
        count, mass = above(ptr, length, inverse_temperature, top, unordered(middle.to(tl.int32)), BLOCK)
        enough = (count >= min_count) & (mass >= min_mass)
        lower = tl.where(enough, middle, lower)
        upper = tl.where(enough, upper, middle - 1)
    return unordered(lower.to(tl.int32))


@triton.jit
def top_k_top_p(ptr, length, inverse_temperature, top, low, top_k, top_p, total, BLOCK: tl.constexpr):
    """The threshold of both: top-p takes its share of what top-k kept (top_k 0: of `total`)."""
    threshold = low
    mass = total
    if top_k > 0:
        threshold = find_threshold(ptr, length, inverse_temperature, top, low, top_k, 0.0, BLOCK)
        if top_p < 1:
            _, mass = above(ptr, length, inverse_temperature, top, threshold, BLOCK)
    if top_p < 1:
        threshold = find_threshold(ptr, length, inverse_temperature, top, threshold, 0, top_p * mass, BLOCK)
    return threshold


@triton.jit
def copy_above(ptr, length, inverse_temperature, threshold, to_ptr, BLOCK: tl.constexpr):
    """Copy the x >= threshold to `to_ptr`, in order and without gaps."""
    filled = 0
    for start in range(0, length, BLOCK):
        x = load_scaled(ptr, start, length, inverse_temperature, BLOCK)
        kept = ((x >= threshold) & (x > float("-inf"))).to(tl.int32)
        place = filled + tl.cumsum(kept, 0) - 1
        tl.store(to_ptr + place, x, mask=kept != 0)
        filled += tl.sum(kept, 0)


@triton.jit
def survey(ptr, vocab, inverse_temperature, BLOCK: tl.constexpr):
    """(largest x, its lowest id, sum of e^(x - largest), how many are finite) of a row."""
    top = float("-inf")
    top_id = 0
    total = 0.0
    finite = 0
    for start in range(0, vocab, BLOCK):
        x = load_scaled(ptr, start, vocab, inverse_temperature, BLOCK)
        block_top, where = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        new = tl.maximum(top, block_top)
        ref = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - ref) + tl.sum(tl.exp(x - ref), 0)
        finite += tl.sum((x > float("-inf")).to(tl.int32), 0)
        top_id = tl.where(block_top > top, start + where, top_id)
        top = new
    return top, top_id, total, finite


@triton.jit
def sample_kernel(
    logits_ptr,
    tokens_ptr,
    scratch_ptr,
    params_ptr,
    top_k_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    stride_logits,
    vocab,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Program b: row b. `params` [B, 3] float32: temperature, top_p, min_p."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride_logits
    temperature = tl.load(params_ptr + row * 3)
    top_p = tl.load(params_ptr + row * 3 + 1)
    min_p = tl.load(params_ptr + row * 3 + 2)
    inverse = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)
    top, top_id, total, finite = survey(logits, vocab, inverse, BLOCK)
    # Not-a-number shows in the total, and so does a row of which nothing is allowed: there is nothing to draw.
    top_id = tl.where((total > 0) & (total < float("inf")), top_id, -1)
    if (temperature <= 0) | (top_id < 0):
        tl.store(tokens_ptr + row, top_id)
        return

    # -- the threshold --
    floor = -3.0e38
    if min_p > 0:
        floor = top + tl.log(min_p)
        finite, total = above(logits, vocab, inverse, top, floor, BLOCK)
    top_k = tl.minimum(tl.load(top_k_ptr + row), finite)
    threshold = floor
    if (top_k > 0) | (top_p < 1):
        # Tightest cut of 4, 8, ... 64 below the top that keeps all that can matter; e^-64 is nothing beside the top.
        need = tl.where(top_k > 0, 0.0, top_p * total)
        gap = 4.0
        low = tl.maximum(top - gap, floor)
        count, mass = above(logits, vocab, inverse, top, low, BLOCK)
        while ((count < top_k) | (mass < need)) & (gap < 64):
            gap = gap * 2
            low = tl.maximum(top - gap, floor)
            count, mass = above(logits, vocab, inverse, top, low, BLOCK)
        is_cut = (count >= top_k) & (mass >= need)
        if is_cut & (count <= CANDIDATES):
            scratch = scratch_ptr + row * CANDIDATES
            copy_above(logits, vocab, inverse, low, scratch, BLOCK)
            # The copy is read by other threads of this program.
            tl.debug_barrier()
            threshold = top_k_top_p(scratch, count, 1.0, top, low, top_k, top_p, total, BLOCK)
        else:
            low = tl.where(is_cut, low, floor)
            threshold = top_k_top_p(logits, vocab, inverse, top, low, top_k, top_p, total, BLOCK)

    # -- the draw --
    key = draw_key(tl.load(seeds_ptr + row), tl.load(choices_ptr + row), tl.load(positions_ptr + row))
    best = float("-inf")
    best_id = top_id
    for start in range(0, vocab, BLOCK):
        x = load_scaled(logits, start, vocab, inverse, BLOCK)
        x = tl.where(x >= threshold, x, float("-inf"))
        if tl.max(x, 0) + MAX_NOISE > best:
            noisy = x + race_noise(key, start + tl.arange(0, BLOCK))
            block_best, where = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
            best_id = tl.where(block_best > best, start + where, best_id)
            best = tl.maximum(best, block_best)
    tl.store(tokens_ptr + row, best_id)


@torch.no_grad()
def sample(
    logits: torch.Tensor,
    *,
    params: torch.Tensor,
    top_k: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    scratch: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw a token for each row of `logits` [B, V], any float type. Returns int32 [B]; -1 where logits are no numbers.

    params     float32 [B, 3]: temperature (0 is greedy), top_p (1 is off), min_p (0 is off)
    top_k      int32 [B], 0 is off
    seeds      int64 [B], the bits of a uint64; choices int32 [B]; positions int32 [B]: the output token's number
    scratch    float32 [at least B, CANDIDATES]
    """
    batch, vocab = logits.shape
    if scratch.shape[0] < batch or scratch.shape[1] != CANDIDATES:
        raise ValueError(f"scratch must be [{batch}, {CANDIDATES}], got {tuple(scratch.shape)}")
    tokens = torch.empty(batch, dtype=torch.int32, device=logits.device) if out is None else out
    sample_kernel[(batch,)](
        logits,
        tokens,
        scratch,
        params,
        top_k,
        seeds,
        choices,
        positions,
        logits.stride(0),
        vocab,
        BLOCK=BLOCK,
        CANDIDATES=CANDIDATES,
        num_warps=NUM_WARPS,
    )
    return tokens

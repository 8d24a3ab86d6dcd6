"""Every kernel again in plain torch: the specification. Slow, obvious, and precise: it computes in the dtype it is
given (tests give it float64), on any device, with no knowledge of tiles, splits or warps.
"""

import torch

from kernels.paged import QUANT_LIMIT, AttentionSpec, PagedKV


def gather(kv: PagedKV, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` keys and values of a sequence, [length, Hkv, D] each in float64, dequantised."""
    size = kv.block_size
    blocks = table[: -(-length // size)].long()
    chosen = kv.cache[blocks].double()  # [n, 2, S, Hkv, D]
    if kv.scale is not None:
        chosen = chosen * kv.scale[blocks].double().transpose(2, 3)[..., None]
    keys, values = chosen[:, 0].flatten(0, 1)[:length], chosen[:, 1].flatten(0, 1)[:length]
    return keys, values


def attention_row(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """One token, the newest of its context: q [Hq, D], keys and values [L, Hkv, D] -> [Hq, D]."""
    if spec.window:
        keys, values = keys[-spec.window :], values[-spec.window :]
    group = q.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    x = torch.einsum("hd,lhd->hl", q.double(), keys) * spec.scale
    if spec.softcap:
        x = spec.softcap * torch.tanh(x / spec.softcap)
    return torch.einsum("hl,lhd->hd", torch.softmax(x, -1), values)


def paged_attention(
    q: torch.Tensor,
    kv: PagedKV,
    spec: AttentionSpec,
    *,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Prefill, decode and any mix: the queries of sequence b are its newest tokens. Returns float64 [T, Hq, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b in range(len(seq_lens)):
        begin, end, length = int(cu_seqlens[b]), int(cu_seqlens[b + 1]), int(seq_lens[b])
        keys, values = gather(kv, block_table[b], length)
        for t in range(begin, end):
            known = length - (end - 1 - t)
            out[t] = attention_row(q[t], keys[:known], values[:known], spec)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, H, D] by its positions; `cos_sin` [max_positions, rotary] is cos | sin."""
    rotary = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].to(x.dtype)[:, None].chunk(2, -1)
    first, second = x[..., :rotary].chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned, x[..., rotary:]], -1)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] -> (stored [..., D], scale [...]): the largest magnitude of a vector becomes the type's limit."""
    limit = QUANT_LIMIT[dtype]
    largest = x.abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, largest / limit).float()
    scaled = (x / scale[..., None]).clamp(-limit, limit)
    return (torch.floor(scaled + 0.5) if dtype == torch.int8 else scaled).to(dtype), scale


def write_cache(kv: PagedKV, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Store keys and values [T, Hkv, D] in their slots, in place; slot -1 is stored nowhere."""
    for t in range(len(slots)):
        block, offset = divmod(int(slots[t]), kv.block_size)
        if block < 0:
            continue
        for side, vectors in enumerate((keys[t], values[t])):
            if kv.scale is None:
                kv.cache[block, side, offset] = vectors.to(kv.cache.dtype)
            else:
                kv.cache[block, side, offset], kv.scale[block, side, :, offset] = quantise(
                    vectors.float(), kv.cache.dtype
                )


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up for gate | up on the last axis."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    approximate = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


_WORD, _LONG = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def mix64(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _LONG
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _LONG
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def noise_bits(seed: int, choice: int, position: int, token: int) -> int:
    """32 random bits: a function of these four and nothing else."""
    key = mix64(mix64(mix64(seed) ^ choice) ^ position)
    scattered = mix32(token * 0x9E3779B1 & _WORD)
    return mix32((scattered ^ (key & _WORD)) * ((key >> 32) | 1) & _WORD)


def race_noise(seed: int, choice: int, position: int, num_tokens: int) -> torch.Tensor:
    """-log e of tokens 0 .. num_tokens - 1, e standard exponential; float64."""
    bits = torch.tensor([noise_bits(seed, choice, position, v) for v in range(num_tokens)], dtype=torch.float64)
    return -torch.log(-torch.log1p(-(bits + 0.5) / 2**32))


def kept_tokens(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Boolean [V]: which tokens can be drawn, by sorting. Ties with the last kept token are kept."""
    x = logits.double() / temperature
    keep = x > -torch.inf
    if min_p > 0:
        keep &= x >= x.max() + torch.log(torch.tensor(min_p, dtype=torch.float64))
    if top_k:
        kept = torch.where(keep, x, -torch.inf)
        keep &= x >= torch.sort(kept, descending=True).values[min(top_k, int(keep.sum())) - 1]
    if top_p < 1:
        p, order = torch.where(keep, torch.softmax(x, -1), 0).sort(descending=True)
        enough = p.cumsum(0) >= top_p * p.sum()
        keep &= x >= x[order[int(enough.int().argmax())]]
    return keep


def sample(logits: torch.Tensor, params: tuple[float, float, float, int], key: tuple[int, int, int]) -> int:
    """Draw from logits [V]; params = (temperature, top_p, min_p, top_k), key = (seed, choice, position)."""
    temperature, top_p, min_p, top_k = params
    if temperature == 0:
        return int((logits == logits.max()).int().argmax())
    keep = kept_tokens(logits, temperature, top_k, top_p, min_p)
    noise = race_noise(*key, len(logits))
    return int(torch.where(keep, logits.double() / temperature + noise, -torch.inf).argmax())


def penalise(logits: torch.Tensor, prompt: list[int], output: list[int], penalties: tuple[float, float, float]) -> None:
    """Presence, frequency and repetition penalties on logits [V], in place."""
    presence, frequency, repetition = penalties
    for token in set(prompt) | set(output):
        x = float(logits[token])
        x = x / repetition if x > 0 else x * repetition
        drawn = output.count(token)
        logits[token] = x - frequency * drawn - (presence if drawn else 0.0)

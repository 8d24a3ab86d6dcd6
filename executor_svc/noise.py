"""The counter generator behind every draw: a pure function of (seed, choice, output position, token id).

Nothing is stored and nothing advances, so a draw is the same in any row, in any batch, before and after a preemption
and in another process. Integer arithmetic only; a GPU kernel that follows these lines draws the same bits.

    key     = mix64(mix64(mix64(seed) ^ choice) ^ position)               uint64; mix64 is SplitMix64's finaliser
    k0, k1  = low and high half of key
    bits(i) = mix32((mix32(i * 0x9E3779B1) ^ k0) * (k1 | 1))              uint32; mix32 is the "lowbias32" finaliser
    u(i)    = (bits(i) + 0.5) / 2^32                                      in (0, 1)
    e(i)    = -log(1 - u(i))                                              standard exponential, fine-grained near 0
"""

import numpy as np

_MASK_64 = (1 << 64) - 1
_M1, _M2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def draw_key(seed: int, choice: int, position: int) -> int:
    return mix64(mix64(mix64(seed) ^ choice) ^ position)


def _mix32_in_place(x: np.ndarray, scratch: np.ndarray) -> None:
    for shift, factor in ((16, _M1), (15, _M2), (16, None)):
        np.right_shift(x, np.uint32(shift), out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        if factor is not None:
            np.multiply(x, factor, out=x)


def mixed_ids(vocab_size: int) -> np.ndarray:
    """uint32 [vocab_size]: the part of every number that no key changes."""
    base = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    _mix32_in_place(base, np.empty_like(base))
    return base


def draw_bits(mixed: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """uint32 [n]: bits(i) under keys[i], uint64, of the token whose mixed id is mixed[i]."""
    bits = (mixed ^ (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)) * (
        (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    )
    _mix32_in_place(bits, np.empty_like(bits))
    return bits


class NoiseSource:
    """bits() over a vocabulary, with the part that no key changes computed once and the buffers kept."""

    def __init__(self, vocab_size: int):
        self._base = mixed_ids(vocab_size)
        self._bits, self._scratch = np.empty_like(self._base), np.empty_like(self._base)

    def all_bits(self, key: int) -> np.ndarray:
        """uint32 [vocab_size]; overwritten by the next call."""
        return self._mix(self._base, key, self._bits, self._scratch)

    def bits_of(self, key: int, token_ids: np.ndarray) -> np.ndarray:
        """uint32 [len(token_ids)], the same numbers as all_bits(key)[token_ids]."""
        base = self._base[token_ids]
        return self._mix(base, key, base, np.empty_like(base))

    @staticmethod
    def _mix(base: np.ndarray, key: int, out: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        np.bitwise_xor(base, np.uint32(key & 0xFFFFFFFF), out=out)
        np.multiply(out, np.uint32((key >> 32) | 1), out=out)
        _mix32_in_place(out, scratch)
        return out


def exponential(bits: np.ndarray) -> np.ndarray:
    """float64: standard exponential numbers."""
    return -np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32)

"""Rotary position embeddings: every scaling rule turned into one cosine and one sine table.

A table row is a position; positions beyond the config's maximum do not exist. `dynamic` scaling therefore never leaves
its unscaled range, and `longrope` picks one of its factor sets by the length the model is served with, because keys
already cached cannot be rotated again.
"""

import math
from collections.abc import Callable

import numpy as np

from executor_svc.errors import StartupError
from executor_svc.model.config import RopeSpec

_ROWS = 8192  # at once: what is computed in float64 stays small


def rope_tables(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [max_position, dim / 2], attention scaling folded in.

    Angles are float32, as transformers has them; cosine and sine of each are rounded once.
    """
    if spec.kind not in _RULES:
        raise StartupError(f"rope type {spec.kind!r} is not supported; supported: {', '.join(sorted(_RULES))}")
    try:
        inv_freq, scaling = _RULES[spec.kind](spec, max_position)
    except (TypeError, KeyError, ValueError, ZeroDivisionError) as error:
        raise StartupError(f"rope parameters for {spec.kind!r} are incomplete or out of range: {error}") from None
    cosine, sine = (np.empty((max_position, len(inv_freq)), np.float32) for _ in range(2))
    for first in range(0, max_position, _ROWS):
        rows = slice(first, min(first + _ROWS, max_position))
        angles = (np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * inv_freq).astype(np.float64)
        cosine[rows], sine[rows] = np.cos(angles), np.sin(angles)
    return cosine * np.float32(scaling), sine * np.float32(scaling)


def _base_inv_freq(spec: RopeSpec) -> np.ndarray:
    return 1.0 / (spec.theta ** _shares(spec))


def _shares(spec: RopeSpec) -> np.ndarray:
    """float32 [dim / 2]: where in the head each pair lies, 0 to 1."""
    return np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)


def _default(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, float]:
    return _base_inv_freq(spec), 1.0


def _linear(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, float]:
    return _base_inv_freq(spec) / float(spec.get("factor")), 1.0


def _llama3(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, float]:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    factor, original = float(spec.get("factor")), float(spec.get("original_max_position_embeddings"))
    low, high = float(spec.get("low_freq_factor")), float(spec.get("high_freq_factor"))
    inv_freq = _base_inv_freq(spec)
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * (inv_freq / factor) + blend * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(between, blended, scaled), 1.0


def _yarn(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, float]:
    original = float(spec.get("original_max_position_embeddings"))
    factor = float(spec.get("factor", max_position / original))

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = spec.get("attention_factor")
    if attention is None:
        mscale, mscale_all = spec.get("mscale"), spec.get("mscale_all_dim")
        both = mscale and mscale_all
        attention = magnitude(factor, mscale) / magnitude(factor, mscale_all) if both else magnitude(factor)

    def correction(num_rotations: float) -> float:
        return spec.dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = correction(spec.get("beta_fast", 32)), correction(spec.get("beta_slow", 1))
    if spec.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - ((np.arange(spec.dim // 2, dtype=np.float32) - low) / (high - low)).clip(0, 1)
    frequencies = spec.theta ** _shares(spec)
    return (1 / (factor * frequencies)) * (1 - keep) + (1 / frequencies) * keep, float(attention)


def _longrope(spec: RopeSpec, max_position: int) -> tuple[np.ndarray, float]:
    original = int(spec.get("original_max_position_embeddings", max_position))
    factor = max_position / original if spec.get("original_max_position_embeddings") else float(spec.get("factor", 1))
    attention = spec.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    stretch = np.array(spec.get("long_factor" if max_position > original else "short_factor"), np.float32)
    if stretch.shape != (spec.dim // 2,):
        raise ValueError(f"{stretch.size} factors for {spec.dim // 2} pairs")
    return 1.0 / (stretch * spec.theta ** _shares(spec)), float(attention)


_RULES: dict[str, Callable[[RopeSpec, int], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

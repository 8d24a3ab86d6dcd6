"""The counter generator against its documentation, in plain integers; and its statistics."""

import math

import numpy as np
import pytest

from executor_svc.noise import NoiseSource, draw_key, exponential
from tests.unit.executor.test_simulated import mix


def mix32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def spelled_out_bits(key: int, token: int) -> int:
    low, high = key % 2**32, key >> 32
    return mix32((mix32(token * 0x9E3779B1 % 2**32) ^ low) * (high | 1) % 2**32)


@pytest.mark.parametrize(("seed", "choice", "position"), [(0, 0, 0), (1, 2, 3), (2**64 - 1, 15, 100_000)])
def test_bits_are_what_the_docstring_says(seed, choice, position):
    key = draw_key(seed, choice, position)
    assert key == mix(mix(mix(seed) ^ choice) ^ position)
    source = NoiseSource(49_152)
    ids = np.array([0, 1, 2, 7, 49_151])
    expected = [spelled_out_bits(key, int(i)) for i in ids]
    assert source.bits_of(key, ids).tolist() == expected
    assert source.all_bits(key)[ids].tolist() == expected


def test_a_draw_leaves_nothing_behind():
    source = NoiseSource(1000)
    first = source.all_bits(draw_key(1, 0, 0)).copy()
    source.all_bits(draw_key(2, 0, 0))
    source.bits_of(draw_key(3, 0, 0), np.arange(10))
    assert np.array_equal(source.all_bits(draw_key(1, 0, 0)), first)


def test_exponentials_are_finite_and_positive_at_both_ends():
    ends = exponential(np.array([0, 1, 2**32 - 1], np.uint32))
    assert np.isfinite(ends).all()
    assert (ends > 0).all()
    assert ends[0] == pytest.approx(2.0**-33)
    assert ends[2] == pytest.approx(33 * math.log(2))


@pytest.mark.parametrize("varying", ["seed", "choice", "position", "token"])
def test_bits_are_uniform_along_every_coordinate(varying):
    """Chi-square over 256 cells of the top and of the bottom byte; 255 degrees of freedom, limit far out at 360."""
    count = 40_000
    if varying == "token":
        bits = NoiseSource(count).all_bits(draw_key(11, 0, 5)).copy()
    else:
        source, token = NoiseSource(64), np.array([17])
        keys = ({"seed": 3, "choice": 1, "position": 2} | {varying: i} for i in range(count))
        bits = np.concatenate([source.bits_of(draw_key(**key), token) for key in keys])
    for shift in (0, 24):
        cells = np.bincount((bits >> np.uint32(shift)) & np.uint32(255), minlength=256)
        assert ((cells - count / 256) ** 2 / (count / 256)).sum() < 360
    uniform = bits / 2.0**32
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.025

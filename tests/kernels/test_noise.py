"""The noise of the GPU sampler is the noise of the CPU sampler, bit for bit: a seed means the same text on either."""

import numpy as np

from executor_svc.noise import NoiseSource, draw_key
from kernels import reference


def test_both_samplers_draw_the_same_bits() -> None:
    source = NoiseSource(100)
    for seed, choice, position in [(0, 0, 0), (2**64 - 1, 15, 3), (12345, 1, 100_000)]:
        expected = [reference.noise_bits(seed, choice, position, token) for token in range(100)]
        assert np.array_equal(source.all_bits(draw_key(seed, choice, position)), expected)

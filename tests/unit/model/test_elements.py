"""Element types without torch: numpy arrays of them hold the numbers that torch's tensors hold."""

import numpy as np
import pytest
import torch

from executor_svc.model import elements
from executor_svc.model.elements import array_type, as_bfloat16, name_of, widened
from executor_svc.model.tensors import tensors
from executor_svc.model.weights import ExpertWeights, LinearWeights

SEED = 20261130


def awkward() -> np.ndarray:
    """Every exponent and both signs, ties of the rounding, and what is no number; more than is converted at once."""
    bits = np.random.default_rng(SEED).integers(0, 2**32, elements._AT_ONCE + 1000, dtype=np.uint64).astype(np.uint32)
    bits[:6] = (0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FFFFFFF)
    bits[-1] = 0xFFFFFFFF
    return bits.view(np.float32).reshape(-1, 4)


def test_bfloat16_is_rounded_as_torch_rounds():
    found, expected = as_bfloat16(awkward()), torch.from_numpy(awkward()).to(torch.bfloat16)
    assert np.array_equal(np.isnan(widened(found)), expected.isnan().numpy())
    finite = ~expected.isnan().numpy()
    assert np.array_equal(found[finite], expected.view(torch.uint16).numpy()[finite])
    assert found.shape == expected.shape


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_become_bfloat16_and_float32(dtype):
    values = np.random.default_rng(SEED).normal(size=(5, 7)).astype(dtype)
    assert np.array_equal(widened(values), torch.from_numpy(values).float().numpy())
    expected = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(as_bfloat16(values), expected.view(torch.uint16).numpy())


def test_widening_bfloat16_is_exact():
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    expected = torch.from_numpy(every).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widened(every).view(np.uint32), expected.view(np.uint32))


def test_copies_are_copies():
    bits = np.ones(3, np.uint16)
    assert not np.shares_memory(as_bfloat16(bits), bits)
    wide = np.ones(3, np.float32)
    assert not np.shares_memory(widened(wide), wide)


def test_names():
    assert [name_of(dtype) for dtype in (torch.bfloat16, "int8", torch.float32)] == ["bfloat16", "int8", "float32"]
    assert [array_type(name).itemsize for name in ("float32", "bfloat16", "float16")] == [4, 2, 2]


def test_weights_become_tensors_over_the_same_memory():
    weight, bias = np.arange(6, dtype=np.uint16).reshape(2, 3), np.ones(2, np.float32)
    weight.flags.writeable = False
    linear = LinearWeights(weight, bias)
    found = tensors(ExpertWeights(linear, [linear], [LinearWeights(torch.zeros(1))]))
    assert found.router.weight.dtype == torch.bfloat16
    assert found.router.weight.shape == (2, 3)
    assert found.gate_up[0].weight.data_ptr() == weight.ctypes.data
    assert found.down[0].bias is None
    bias[0] = 5
    assert found.router.bias.tolist() == [5, 1]

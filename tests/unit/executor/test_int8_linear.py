"""Linear layers in bytes: the formula in float64, sizes on both sides of what a device wants, rows on their own."""

import pytest
import torch

from executor_svc.backends.int8_linear import Int8Linear
from executor_svc.model.weights import LinearWeights

SEED = 11


def layer(num_outputs: int, num_inputs: int, *, bias: bool = True) -> tuple[Int8Linear, LinearWeights]:
    draw = torch.Generator().manual_seed(SEED)
    weight = torch.randn(num_outputs, num_inputs, generator=draw)
    weights = LinearWeights(weight, torch.randn(num_outputs, generator=draw) if bias else None)
    return Int8Linear(weights, torch.float32), weights


def reference(x: torch.Tensor, weights: LinearWeights) -> torch.Tensor:
    """The formula, in float64, element by element rounded as it says."""
    x, w = x.double(), weights.weight.double()
    x_scale, w_scale = x.abs().amax(1, keepdim=True) / 127, w.abs().amax(1, keepdim=True) / 127
    steps = torch.where(x_scale > 0, (x / x_scale).round(), 0.0)
    y = steps @ (w / w_scale).round().T * x_scale * w_scale.T
    return y if weights.bias is None else y + weights.bias.double()


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(40, 64), (7, 64), (9, 7), (8, 8), (16, 9)])
def test_it_is_the_formula(num_rows, num_outputs, num_inputs):
    made, weights = layer(num_outputs, num_inputs, bias=num_rows % 2 == 0)
    x = torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)) * 3
    y = made(x)
    assert (y.shape, y.dtype) == ((num_rows, num_outputs), torch.float32)
    # A value within rounding of half a step may go to the other side: one step of one input.
    step = x.abs().amax(1, keepdim=True) / 127 * weights.weight.abs().amax(1)
    assert ((y.double() - reference(x, weights)).abs() <= step * 1.01 + 1e-4).all()
    exact = x.double() @ weights.weight.double().T + (0 if weights.bias is None else weights.bias.double())
    assert (y.double() - exact).norm() / exact.norm() < 0.02


def test_a_row_is_the_same_alone_and_in_a_crowd_and_keeps_what_is_wrong_to_itself():
    made, _ = layer(24, 40)
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(SEED))
    together = made(x)
    for row in (0, 16, 49):
        assert torch.equal(made(x[row : row + 1])[0], together[row])
    x[3, 5], x[4, 0], x[5] = float("nan"), float("inf"), 0.0
    spoilt = made(x)
    assert torch.isnan(spoilt[3]).all()
    assert not torch.isfinite(spoilt[4]).any()
    assert torch.equal(spoilt[5], made.bias)
    assert torch.equal(spoilt[6:], together[6:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_keep_their_type(dtype):
    made, weights = layer(24, 40)
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    y = Int8Linear(weights, dtype)(x)
    assert y.dtype == dtype
    assert (y.float() - made(x.float())).norm() / y.float().norm() < 2**-7  # two roundings to eight bits

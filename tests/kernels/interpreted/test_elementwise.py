"""Rotary embedding with cache write, RMS norm and gated activations against their specification."""

import pytest
import torch

from kernels import reference
from kernels.norm_act import gated_activation, rms_norm
from kernels.paged import PagedKV
from kernels.rope_cache import rope_and_cache
from tests.kernels.interpreted.problems import assert_close, assert_guards, guarded_like, poisoned_kv

# One rounding of the output type.
ROUNDING = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotary_table(length: int, rotary: int) -> torch.Tensor:
    angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, rotary, 2) / rotary))
    return torch.cat([angle.cos(), angle.sin()], -1)


def run_rope(
    kv_dtype: torch.dtype,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rotary: int = 64,
    head_size: int = 64,
    norm: bool = False,
) -> None:
    q_heads, kv_heads, block_size = 3, 2, 16
    slots = torch.tensor([0, 17, -1, 63, 40], dtype=torch.int32)
    positions = torch.tensor([0, 5, 0, 99, 31], dtype=torch.int32)
    num_tokens = len(slots)
    qkv = rand(num_tokens, (q_heads + 2 * kv_heads) * head_size).to(dtype)
    table = rotary_table(100, rotary) if rotary else None
    weights = (1 + 0.1 * rand(head_size, seed=1), 1 + 0.1 * rand(head_size, seed=2), 1e-5) if norm else None
    kv = poisoned_kv((4, block_size, kv_heads, head_size), kv_dtype)
    whole, q_out = guarded_like(torch.empty((num_tokens, q_heads, head_size), dtype=dtype))
    rope_and_cache(qkv, kv, cos_sin=table, positions=positions, slots=slots, q_out=q_out, norm=weights)
    assert_guards(whole)

    heads = qkv.double().view(num_tokens, -1, head_size)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], 1)
    if weights is not None:
        q, k = reference.rms_norm(q, weights[0], 1e-5), reference.rms_norm(k, weights[1], 1e-5)
    if table is not None:
        q, k = reference.rope(q, table, positions), reference.rope(k, table, positions)
    assert_close(q_out, q, ROUNDING[dtype])
    expected = poisoned_kv((4, block_size, kv_heads, head_size), kv_dtype)
    reference.write_cache(expected, k, v, slots)
    compare_caches(kv, expected, slots[slots >= 0])


def compare_caches(actual: PagedKV, expected: PagedKV, slots: torch.Tensor) -> None:
    written = torch.zeros(actual.cache.shape[0] * actual.block_size, dtype=torch.bool)
    written[slots.long()] = True
    written = written.view(-1, actual.block_size)

    def by_slot(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
        raw = kv.cache.transpose(1, 2)
        values = raw.float()
        if kv.scale is not None:
            values = values * kv.scale.permute(0, 3, 1, 2)[..., None]
        return raw[written].float() if kv.scale is None else values[written], raw[~written]

    got, untouched = by_slot(actual)
    want, pristine = by_slot(expected)
    # A float32 sum in another order may move a value across a rounding boundary: one unit of the stored type.
    step = {torch.int8: 1e-2, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}.get(actual.cache.dtype, 4e-3)
    assert_close(got, want, step)
    kind = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[untouched.element_size()]
    assert torch.equal(untouched.contiguous().view(kind), pristine.contiguous().view(kind))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rope_and_cache_write(kv_dtype: torch.dtype) -> None:
    run_rope(kv_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rope_and_cache_write_in_other_types(dtype: torch.dtype) -> None:
    run_rope(dtype, dtype)


@pytest.mark.parametrize("rotary", [0, 16, 32])
def test_partial_rotation_leaves_the_rest(rotary: int) -> None:
    run_rope(torch.bfloat16, rotary=rotary)


def test_norm_of_queries_and_keys() -> None:
    run_rope(torch.bfloat16, norm=True)


def test_head_size_that_is_no_power_of_two() -> None:
    run_rope(torch.int8, head_size=96, rotary=96, norm=True)


def test_a_quantised_zero_vector_stays_zero() -> None:
    kv = poisoned_kv((1, 16, 1, 64), torch.int8)
    q_out = torch.empty((1, 1, 64), dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32)
    rope_and_cache(
        torch.zeros((1, 192), dtype=torch.bfloat16), kv, cos_sin=None, positions=zero, slots=zero, q_out=q_out
    )
    assert bool((kv.cache[0, :, 0] == 0).all())
    assert bool((kv.scale[0, :, 0, 0] == 1).all())


@pytest.mark.parametrize("width", [63, 64, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = rand(5, width + 8).to(dtype)[:, :width], rand(width, seed=1)
    whole, out = guarded_like(x.contiguous())
    rms_norm(x, weight, 1e-5, out=out)
    assert_guards(whole)
    assert_close(out, reference.rms_norm(x.double(), weight.double(), 1e-5), ROUNDING[dtype])


def test_rms_norm_adds_to_the_residual_as_torch_does() -> None:
    x, residual, weight = rand(3, 576).bfloat16(), rand(3, 576, seed=1).bfloat16(), rand(576, seed=2).bfloat16()
    stream = x + residual
    y = rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, stream)
    assert_close(y, reference.rms_norm(stream.double(), weight.double(), 1e-6), ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [1, 1023, 1025])
def test_gated_activation(activation: str, width: int) -> None:
    gate_up = (3 * rand(2, 2 * width)).bfloat16()
    whole, out = guarded_like(torch.empty((2, width), dtype=torch.bfloat16))
    gated_activation(gate_up, activation, out=out)
    assert_guards(whole)
    assert_close(out, reference.gated_activation(gate_up.double(), activation), ROUNDING[torch.bfloat16])


def test_gated_activation_far_out() -> None:
    gate_up = torch.tensor([[-1000.0, -50.0, 50.0, 1000.0, 1.0, 1.0, 1.0, 1.0]])
    for activation in ("silu", "gelu_tanh", "gelu"):
        assert_close(
            gated_activation(gate_up, activation), reference.gated_activation(gate_up.double(), activation), 1e-6
        )


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relu"):
        gated_activation(torch.zeros(1, 2), "relu")

"""The shim's own test: were it wrong, every other interpreted test would judge kernels by a crooked ruler."""

import pytest
import torch
import triton
import triton.language as tl

N = 64
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty))


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def arithmetic_kernel(a_ptr, b_ptr, y_ptr, less_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(y_ptr + i, a * b + a)
    tl.store(less_ptr + i, (a < b).to(tl.int32))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_casts_equal_torch_bit_for_bit(source: torch.dtype, target: torch.dtype) -> None:
    x = (random(4096) * 3).to(source)
    y = torch.empty(4096, dtype=target)
    cast_kernel[(1,)](x, y, N=4096)
    assert torch.equal(y.float(), x.float().to(target).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_dot_is_exact_products_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = random(N, N).to(dtype), random(N, N, seed=1).to(dtype)
    c = torch.empty((N, N))
    dot_kernel[(1,)](a, b, c, N=N)
    expected = a.double() @ b.double()
    assert float((c - expected).norm() / expected.norm()) < 3e-7


def test_bfloat16_arithmetic_and_comparison_equal_torch() -> None:
    a, b = random(N).bfloat16(), random(N, seed=1).bfloat16()
    y, less = torch.empty_like(a), torch.empty(N, dtype=torch.int32)
    arithmetic_kernel[(1,)](a, b, y, less, N=N)
    assert torch.equal(y, a * b + a)
    assert torch.equal(less.bool(), a < b)


@triton.jit
def compare_scalar_kernel(x_ptr, y_ptr, bound, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, ((i < N // 2) & (tl.load(x_ptr + i) > bound)).to(tl.int32))


def test_a_mask_joins_a_comparison_with_a_scalar() -> None:
    x, y = random(N), torch.empty(N, dtype=torch.int32)
    compare_scalar_kernel[(1,)](x, y, float("-inf"), N=N)
    assert y.tolist() == [1] * (N // 2) + [0] * (N // 2)

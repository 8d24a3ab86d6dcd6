"""The elementwise steps between matrix products.

rms_norm:  r' = r + x (rounded to r's type)    y = r' / sqrt(mean(r'^2) + eps) * w
gated:     y = act(gate) * up                  act = silu or gelu (tanh form, or exact)
"""

import torch
import triton
import triton.language as tl

# Columns of one program of the gated activation.
BLOCK = 1024


@triton.jit(do_not_specialize=["eps"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    eps,
    RESIDUAL: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
):
    """Program t: row t."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, N_PAD)
    inside = col < N
    x = tl.load(x_ptr + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        at = residual_ptr + row * N + col
        stream = x + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        # The norm reads the stream as the next layer will: rounded.
        stored = stream.to(residual_ptr.dtype.element_ty)
        tl.store(at, stored, mask=inside)
        x = stored.to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=inside, other=0.0).to(tl.float32)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / N + eps)) * weight
    tl.store(out_ptr + row * N + col, y.to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise rows of `x` [T, N]; with `residual` [T, N], first add x to it in place and normalise the sum.

    weight [N] of any float type. x rows may be strided; residual and out are contiguous, out like x unless given.
    """
    num_rows, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    rms_norm_kernel[(num_rows,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        x.stride(0),
        eps,
        RESIDUAL=residual is not None,
        N=width,
        N_PAD=triton.next_power_of_2(width),
        num_warps=row_warps(width),
    )
    return out


def row_warps(width: int) -> int:
    """About eight elements, one 16-byte access, for each thread and turn."""
    return min(8, max(1, triton.next_power_of_2(width) // 512))


@triton.jit
def gated_kernel(x_ptr, out_ptr, stride_x, ACT: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, i): BLOCK columns of row t."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < F
    gate = tl.load(x_ptr + row * stride_x + col, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + F + col, mask=inside, other=0.0).to(tl.float32)
    if ACT == "silu":
        y = gate / (1.0 + tl.exp(-gate))
    elif ACT == "gelu_tanh":
        # x/2 (1 + tanh u) = x / (1 + e^-2u)
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + tl.exp(-2.0 * u))
    else:
        y = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out_ptr + row * F + col, (y * up).to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def gated_activation(gate_up: torch.Tensor, activation: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """act(gate) * up for `gate_up` [T, 2F], gate | up; rows may be strided. `activation`: silu, gelu_tanh or gelu."""
    if activation not in ("silu", "gelu_tanh", "gelu"):
        raise ValueError(f"activation must be silu, gelu_tanh or gelu, got {activation!r}")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width)) if out is None else out
    grid = (num_rows, triton.cdiv(width, BLOCK))
    gated_kernel[grid](gate_up, out, gate_up.stride(0), ACT=activation, F=width, BLOCK=BLOCK, num_warps=4)
    return out

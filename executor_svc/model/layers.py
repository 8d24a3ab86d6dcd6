"""The few operations a decoder is made of, in torch: the readable form and the reference for the native ones.

Shapes: T tokens of a step, E hidden size, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from executor_svc.model.weights import ExpertWeights, LinearWeights

Linear = Callable[[torch.Tensor], torch.Tensor]


class PlainLinear:
    """y = x @ weight.T + bias through torch."""

    def __init__(self, weights: LinearWeights, dtype: torch.dtype):
        self.weight = weights.weight.to(dtype).contiguous()
        self.bias = None if weights.bias is None else weights.bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """The same through oneDNN with the weight reordered once; about twice as fast at small batches in bfloat16."""

    def __init__(self, weights: LinearWeights, dtype: torch.dtype):
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weights.weight.to(dtype).contiguous(), None)
        self.bias = None if weights.bias is None else weights.bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def linear_class(dtype: torch.dtype) -> type[PlainLinear] | type[PackedLinear]:
    """PackedLinear where oneDNN's private operators exist and are right, else PlainLinear."""
    probe = LinearWeights(torch.eye(32), None)
    x = torch.arange(32, dtype=torch.float32).reshape(1, 32).to(dtype)
    try:
        return PackedLinear if torch.equal(PackedLinear(probe, dtype)(x), x) else PlainLinear
    except (RuntimeError, AttributeError, TypeError):
        return PlainLinear


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last axis, computed in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotary embedding: element i turns with element i + dim / 2; elements past dim stay."""
    half = cos_TD.shape[-1]
    cos, sin = cos_TD[:, None], sin_TD[:, None]
    a, b = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_THD.dtype)
    return turned if 2 * half == x_THD.shape[-1] else torch.cat([turned, x_THD[..., 2 * half :]], dim=-1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Mlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str):
        self.gate_up, self.down = gate_up, down
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)


class Experts:
    """A mixture of experts: each token goes to its top experts, weighted by the router."""

    def __init__(self, weights: ExpertWeights, make: Callable[[LinearWeights], Linear], activation: str, **routing):
        self.router = make(weights.router)
        pairs = zip(weights.gate_up, weights.down, strict=True)
        self.experts = [Mlp(make(gate_up), make(down), activation) for gate_up, down in pairs]
        self.num_active: int = routing["num_active"]
        self.renormalise: bool = routing["renormalise"]

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        share = torch.softmax(self.router(x_TE).float(), dim=-1)
        share, chosen = torch.topk(share, self.num_active, dim=-1)
        if self.renormalise:
            share = share / share.sum(-1, keepdim=True)
        y = torch.zeros_like(x_TE)
        for e in torch.unique(chosen).tolist():
            tokens, place = torch.where(chosen == e)
            part = self.experts[e](x_TE[tokens]) * share[tokens, place, None].to(x_TE.dtype)
            y.index_add_(0, tokens, part)
        return y

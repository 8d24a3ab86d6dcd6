"""The decoder in torch: every supported family on any device, the reference for the native one.

Which optional parts a layer has is decided by which of its weights are None.
"""

from collections.abc import Callable

import numpy as np
import torch

from executor_svc.model.attention import PagedAttention
from executor_svc.model.layers import Experts, Linear, Mlp, linear_class, rms_norm, rotate
from executor_svc.model.rope import rope_tables
from executor_svc.model.tensors import tensors
from executor_svc.model.weights import LayerWeights, LinearWeights, Progress, WeightSource, each_layer

# Plans one step: (batch, kv, config, device) -> what each layer calls with (q, k, v, layer). A device brings its own.
AttentionFactory = Callable[..., Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]]


class TorchDecoder:
    """All families, any device, plain torch."""

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        attention: AttentionFactory = PagedAttention,
        progress: Progress | None = None,
    ):
        self.config = config = source.config
        self.dtype = self.kv_dtype = dtype
        self.device = torch.device(device)
        self.attention = attention
        linear = linear_class(dtype) if device == "cpu" and dtype != torch.float32 else _plain()
        self.description = f"torch, {str(dtype).removeprefix('torch.')}, {linear.__name__}"

        def make(weights: LinearWeights) -> Linear:
            return linear(_on(weights, self.device), dtype)

        self.embedding = tensors(source.embedding()).to(self.device, dtype)
        self.final_norm = tensors(source.final_norm()).to(self.device)
        tables = [rope_tables(rope, config.max_position) for rope in config.ropes]
        self.ropes = [tuple(tensors(table).to(self.device) for table in pair) for pair in tables]
        self.layers: list[_Layer] = []
        for index, weights in enumerate(each_layer(source, progress)):
            self.layers.append(_Layer(tensors(weights), make, self, index))
        self.head = make(tensors(source.head()))
        source.finish()

    @torch.inference_mode()
    def forward(self, batch, kv) -> torch.Tensor:
        """Float32 logits [len(batch.logits_index), vocab_size]."""
        token_ids = _index(batch.token_ids, self.device)
        positions = _index(batch.positions, self.device)
        attention = self.attention(batch, kv, self.config, self.device)
        angles = [(cos[positions], sin[positions]) for cos, sin in self.ropes]
        x = self.embedding[token_ids] * self.config.embedding_scale
        for layer in self.layers:
            x = layer(x, angles, attention)
        x = rms_norm(x[_index(batch.logits_index, self.device)], self.final_norm, self.config.norm_eps)
        logits = self.head(x).float() * self.config.logits_scale
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class _Layer:
    """One layer: attention and MLP, each between optional norms, added to the residual stream."""

    def __init__(self, weights: LayerWeights, make, decoder: TorchDecoder, index: int):
        config = decoder.config
        self.config, self.index, self.spec = config, index, config.layers[index]
        for name in ("attention_in", "attention_out", "mlp_in", "mlp_out", "q_norm", "k_norm"):
            weight = getattr(weights, name)
            setattr(self, name, None if weight is None else weight.to(decoder.device))
        self.qkv, self.output = make(weights.qkv), make(weights.output)
        if weights.experts is not None:
            routing = {"num_active": config.num_active_experts, "renormalise": config.renormalise_experts}
            self.mlp: Experts | Mlp = Experts(weights.experts, make, config.activation, **routing)
        else:
            self.mlp = Mlp(make(weights.gate_up), make(weights.down), config.activation)

    def __call__(self, x: torch.Tensor, angles: list, attention: Callable) -> torch.Tensor:
        scale = self.config.residual_scale
        y = self._attend(self._norm("attention_in", x), angles, attention)
        x = x + self._norm("attention_out", y) * scale
        y = self.mlp(self._norm("mlp_in", x))
        return x + self._norm("mlp_out", y) * scale

    def _attend(self, x: torch.Tensor, angles: list, attention: Callable) -> torch.Tensor:
        config = self.config
        q, k, v = self.qkv(x).split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        q, k = self._head_norm("q_norm", q, config.num_heads), self._head_norm("k_norm", k, config.num_kv_heads)
        v = v.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if self.spec.rope is not None:
            q, k = rotate(q, *angles[self.spec.rope]), rotate(k, *angles[self.spec.rope])
        return self.output(attention(q, k, v, self.index).flatten(1))

    def _head_norm(self, name: str, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Split into heads; the optional norm covers a head or, where its weight is longer, all of them."""
        weight = getattr(self, name)
        heads = x.unflatten(-1, (num_heads, self.config.head_dim))
        if weight is None:
            return heads
        if weight.numel() == self.config.head_dim:
            return rms_norm(heads, weight, self.config.norm_eps)
        return rms_norm(x, weight, self.config.norm_eps).view_as(heads)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)
        return x if weight is None else rms_norm(x, weight, self.config.norm_eps)


def _plain():
    from executor_svc.model.layers import PlainLinear

    return PlainLinear


def _on(weights: LinearWeights, device: torch.device) -> LinearWeights:
    return LinearWeights(weights.weight.to(device), None if weights.bias is None else weights.bias.to(device))


def _index(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

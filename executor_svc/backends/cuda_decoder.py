"""The decoder on Triton kernels: the same models as `TorchDecoder`, over device-resident indices.

Norms carry the residual stream in place; everything between the projections is one kernel. Launches nothing that waits
for the device, so a decode step of it can be recorded in a graph (mixtures of experts choose on the host and cannot).
"""

from dataclasses import dataclass

import torch

from executor_svc.backends.cuda_step import StepTensors
from executor_svc.backends.int8_linear import Int8Linear
from executor_svc.model.config import ModelConfig
from executor_svc.model.layers import Experts, PlainLinear
from executor_svc.model.rope import rope_tables
from executor_svc.model.tensors import tensors
from executor_svc.model.weights import LayerWeights, LinearWeights, Progress, WeightSource, each_layer
from kernels.attention_decode import DecodeWorkspace, decode_attention
from kernels.attention_prefill import prefill_attention
from kernels.attention_shared import shared_prefix_attention
from kernels.norm_act import gated_activation, rms_norm
from kernels.paged import AttentionSpec, PagedKV
from kernels.rope_cache import rope_and_cache


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """`SharedPlan` on the device, over the decoding entries of the step."""

    members: torch.Tensor
    work: torch.Tensor
    num_shared_splits: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What every layer's attention reads in a step."""

    step: StepTensors
    tables: torch.Tensor  # int32 [B, max_blocks], in the order of the step
    workspace: DecodeWorkspace
    shared: SharedPrefixes | None = None


class TritonDecoder:
    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        linear: type[PlainLinear] | type[Int8Linear] = PlainLinear,
        progress: Progress | None = None,
    ):
        """dtype: of everything between the linear layers, which are `linear`'s."""
        self.config = config = source.config
        self.dtype, self.device = dtype, device

        def make(weights: LinearWeights) -> PlainLinear | Int8Linear:
            bias = None if weights.bias is None else weights.bias.to(device)
            return linear(LinearWeights(weights.weight.to(device), bias), dtype)

        self.embedding = tensors(source.embedding()).to(device, dtype)
        self.final_norm = tensors(source.final_norm()).to(device)
        tables = [tensors(list(rope_tables(rope, config.max_position))) for rope in config.ropes]
        self.ropes = [torch.cat(pair, 1).to(device) for pair in tables]
        self.layers: list[_Layer] = []
        for index, weights in enumerate(each_layer(source, progress)):
            self.layers.append(_Layer(tensors(weights), make, self, index))
        self.head = make(tensors(source.head()))
        source.finish()

    @property
    def is_recordable(self) -> bool:
        return not any(layer.is_sparse for layer in self.config.layers)

    @torch.inference_mode()
    def forward(
        self,
        attention: AttentionStep,
        kv: list[PagedKV],
        newest: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 logits [S, vocab] of the tokens in `logits_index` (of all when it is None), in `out` if given.

        newest  int32 [rows]: the token each row drew last, for token ids that only the device knows
        """
        step = attention.step
        drawn = newest[step.token_rows.long()]
        token_ids = torch.where(step.token_ids >= 0, step.token_ids, drawn)
        stream = self.embedding[token_ids.long()]
        if self.config.embedding_scale != 1:
            stream = stream * self.config.embedding_scale
        update: torch.Tensor | None = None
        for layer in self.layers:
            update = layer(stream, update, attention, kv[layer.index])
        assert update is not None
        stream = stream + update
        if step.logits_index is not None:
            if not len(step.logits_index):
                return torch.empty((0, self.config.vocab_size), dtype=torch.float32, device=self.device)
            stream = stream[step.logits_index.long()]
        raw = self.head(rms_norm(stream, self.final_norm, self.config.norm_eps))
        logits = raw.float() if out is None else out.copy_(raw)
        if self.config.logits_scale != 1:
            logits.mul_(self.config.logits_scale)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class _Layer:
    """One layer. It takes the stream and the update not yet added to it, and returns its own update."""

    def __init__(self, weights: LayerWeights, make, decoder: TritonDecoder, index: int):
        config: ModelConfig = decoder.config
        self.config, self.index = config, index
        spec = config.layers[index]
        self.attention = AttentionSpec(config.attention_scale, spec.window or 0, config.attention_softcap or 0.0)
        self.cos_sin = None if spec.rope is None else decoder.ropes[spec.rope]

        def norm(weight: torch.Tensor | None) -> torch.Tensor | None:
            return None if weight is None else weight.to(decoder.device)

        self.attention_in, self.attention_out = norm(weights.attention_in), norm(weights.attention_out)
        self.mlp_in, self.mlp_out = norm(weights.mlp_in), norm(weights.mlp_out)
        self.q_norm, self.k_norm = norm(weights.q_norm), norm(weights.k_norm)
        self.qkv, self.output = make(weights.qkv), make(weights.output)
        self.experts = None
        if weights.experts is not None:
            routing = {"num_active": config.num_active_experts, "renormalise": config.renormalise_experts}
            self.experts = Experts(weights.experts, make, config.activation, **routing)
        else:
            self.gate_up, self.down = make(weights.gate_up), make(weights.down)

    def __call__(
        self, stream: torch.Tensor, update: torch.Tensor | None, attention: AttentionStep, kv: PagedKV
    ) -> torch.Tensor:
        x = self._enter(self.attention_in, stream, update)
        update = self._leave(self.attention_out, self._attend(x, attention, kv))
        x = self._enter(self.mlp_in, stream, update)
        y = self.experts(x) if self.experts is not None else self._mlp(x)
        return self._leave(self.mlp_out, y)

    def _enter(self, weight: torch.Tensor | None, stream: torch.Tensor, update: torch.Tensor | None) -> torch.Tensor:
        """Add the update to the stream, in place, and normalise the sum."""
        if weight is None:
            return stream if update is None else stream.add_(update)
        if update is None:
            return rms_norm(stream, weight, self.config.norm_eps)
        return rms_norm(update, weight, self.config.norm_eps, residual=stream)

    def _leave(self, weight: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
        y = y if weight is None else rms_norm(y, weight, self.config.norm_eps)
        return y if self.config.residual_scale == 1 else y * self.config.residual_scale

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated_activation(self.gate_up(x), self.config.activation))

    def _attend(self, x: torch.Tensor, attention: AttentionStep, kv: PagedKV) -> torch.Tensor:
        config, step, tables = self.config, attention.step, attention.tables
        qkv = self.qkv(x)
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            if self.q_norm.numel() == config.head_dim:
                norm = (self.q_norm, self.k_norm, config.norm_eps)
            else:
                self._norm_whole(qkv, self.q_norm, self.k_norm)
        q = torch.empty((len(x), config.num_heads, config.head_dim), dtype=x.dtype, device=x.device)
        rope_and_cache(qkv, kv, cos_sin=self.cos_sin, positions=step.positions, slots=step.slots, q_out=q, norm=norm)
        out = torch.empty_like(q)
        nd = step.num_decode
        if nd:
            shared = attention.shared if self.attention.window == 0 else None
            if shared is not None:
                shared_prefix_attention(
                    q[:nd],
                    kv,
                    self.attention,
                    block_table=tables[:nd],
                    members=shared.members,
                    work=shared.work,
                    workspace=attention.workspace,
                )
            decode_attention(
                q[:nd],
                kv,
                self.attention,
                block_table=tables[:nd],
                seq_lens=step.seq_lens[:nd],
                max_splits=step.max_splits,
                workspace=attention.workspace,
                out=out[:nd],
                num_shared_splits=None if shared is None else shared.num_shared_splits,
            )
        prefill_attention(
            q[nd:],
            kv,
            self.attention,
            block_table=tables[nd:],
            cu_seqlens=step.cu_seqlens,
            seq_lens=step.seq_lens[nd:],
            work=step.work,
            out=out[nd:],
        )
        return self.output(out.flatten(1))

    def _norm_whole(self, qkv: torch.Tensor, *weights: torch.Tensor) -> None:
        """A norm over all heads of the queries, and one over all of the keys (OLMo2)."""
        begin = 0
        for weight in weights:
            part = qkv[:, begin : begin + weight.numel()]
            part.copy_(rms_norm(part, weight, self.config.norm_eps))
            begin += weight.numel()

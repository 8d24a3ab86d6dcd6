"""From a model directory to a decoder ready to run.

`WeightSource` gives a model's parameters layer by layer in the decoder's own arrangement (projections fused, biases
zero-filled, norm offsets added), whatever the checkpoint calls them; `load_model` picks the decoder that runs them best
on this machine. Nothing is ever unpickled and no code of the model's directory runs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig

if TYPE_CHECKING:
    from executor_svc.model.decoder import Decoder

Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass
class LinearWeights:
    """y = x @ weight.T + bias; weight is [outputs, inputs] in the type it has on disk."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass
class ExpertWeights:
    """A mixture of experts."""

    router: LinearWeights
    gate_up: list[LinearWeights]
    down: list[LinearWeights]


@dataclass
class LayerWeights:
    """One layer; norms are float32 and None where the family has none."""

    attention_in: torch.Tensor | None
    attention_out: torch.Tensor | None
    mlp_in: torch.Tensor | None
    mlp_out: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: LinearWeights  # outputs: queries, keys, values
    output: LinearWeights
    gate_up: LinearWeights | None  # outputs: gate, up
    down: LinearWeights | None
    experts: ExpertWeights | None


class WeightSource:
    """A checkpoint read through its family's table row."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig):
        self.checkpoint = checkpoint
        self.config = config
        self.prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in checkpoint), "model.")
        self.num_embeddings = checkpoint.shape(f"{self.prefix}embed_tokens.weight")[0]
        if self.num_embeddings < config.vocab_size:
            raise StartupError(
                f"{checkpoint.directory}: {self.num_embeddings} embeddings for a vocab_size of {config.vocab_size}"
            )

    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]; padding rows past the vocabulary are cut off."""
        shape = (self.num_embeddings, self.config.hidden_size)
        return self.checkpoint.take(f"{self.prefix}embed_tokens.weight", shape)[: self.config.vocab_size]

    def head(self) -> LinearWeights:
        """The language-model head: its own tensor, or the embedding where they are tied."""
        name = next((n for n in _HEADS if n in self.checkpoint), None)
        if self.config.tie_embeddings or (self.config.tie_embeddings is None and name is None):
            return LinearWeights(self.embedding())
        if name is None:
            raise StartupError(
                f"{self.checkpoint.directory}: no lm_head.weight, though config.json unties the embeddings"
            )
        rows = self.checkpoint.shape(name)[0]
        if rows < self.config.vocab_size:
            raise StartupError(
                f"{self.checkpoint.directory}: {name} has {rows} rows for a vocab_size of {self.config.vocab_size}"
            )
        return LinearWeights(self.checkpoint.take(name, (rows, self.config.hidden_size))[: self.config.vocab_size])

    def final_norm(self) -> torch.Tensor:
        """Weight of the norm before the head."""
        return self._norm(f"{self.prefix}norm.weight", self.config.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        """Everything of layer `index`."""
        config, family = self.config, self.config.family
        base = f"{self.prefix}layers.{index}."
        norms = {
            place: self._norm(f"{base}{name}.weight", config.hidden_size) if name else None
            for place, name in vars(family.norms).items()
        }
        per_head = family.qk_norm == "head"
        has_qk_norm = family.qk_norm != "none"
        sparse = config.layers[index].is_sparse
        return LayerWeights(
            **norms,
            q_norm=self._norm(f"{base}self_attn.q_norm.weight", config.head_dim if per_head else config.q_size)
            if has_qk_norm
            else None,
            k_norm=self._norm(f"{base}self_attn.k_norm.weight", config.head_dim if per_head else config.kv_size)
            if has_qk_norm
            else None,
            qkv=self._qkv(base),
            output=self._linear(f"{base}self_attn.o_proj", config.hidden_size, config.q_size),
            gate_up=None if sparse else self._gate_up(base),
            down=None if sparse else self._linear(f"{base}mlp.down_proj", config.hidden_size, config.intermediate_size),
            experts=self._experts(base) if sparse else None,
        )

    def finish(self) -> None:
        """All layers were read: complain about tensors that none of them used, then close the files."""
        self.checkpoint.require_all_taken(lambda name: any(part in name for part in _IGNORED))
        self.checkpoint.close()

    def _qkv(self, base: str) -> LinearWeights:
        config = self.config
        if config.family.fused_projections:
            return self._linear(f"{base}self_attn.qkv_proj", config.q_size + 2 * config.kv_size, config.hidden_size)
        sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        return fuse([self._linear(f"{base}self_attn.{n}", size, config.hidden_size) for n, size in sizes.items()])

    def _gate_up(self, base: str) -> LinearWeights:
        config = self.config
        if config.family.fused_projections:
            return self._linear(f"{base}mlp.gate_up_proj", 2 * config.intermediate_size, config.hidden_size)
        names = ("gate_proj", "up_proj")
        return fuse([self._linear(f"{base}mlp.{n}", config.intermediate_size, config.hidden_size) for n in names])

    def _experts(self, base: str) -> ExpertWeights:
        config, names = self.config, self.config.family.experts
        assert names is not None
        hidden, width = config.hidden_size, config.expert_size
        gate_up, down = [], []
        for e in range(config.num_experts):
            parts = [self._linear(base + name.format(e=e), width, hidden) for name in (names.gate, names.up)]
            gate_up.append(fuse(parts))
            down.append(self._linear(base + names.down.format(e=e), hidden, width))
        return ExpertWeights(self._linear(base + names.router, config.num_experts, hidden), gate_up, down)

    def _linear(self, name: str, outputs: int, inputs: int) -> LinearWeights:
        weight = self.checkpoint.take(f"{name}.weight", (outputs, inputs))
        has_bias = f"{name}.bias" in self.checkpoint
        return LinearWeights(weight, self.checkpoint.take(f"{name}.bias", (outputs,)) if has_bias else None)

    def _norm(self, name: str, size: int) -> torch.Tensor:
        return self.checkpoint.take(name, (size,)).float() + self.config.family.norm_offset


_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
_IGNORED = ("rotary_emb.inv_freq", "lm_head.weight", "vision_tower.", "multi_modal_projector.")


def fuse(parts: list[LinearWeights]) -> LinearWeights:
    """Several projections of the same input as one."""
    weight = torch.cat([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return LinearWeights(weight)
    biases = [part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts]
    return LinearWeights(weight, torch.cat(biases))


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | Literal["auto", "int8"] = "auto",
    progress: Progress | None = None,
    num_threads: int = 0,
    cache_dir: Path | None = None,
    native: bool = True,
) -> "Decoder":
    """The decoder for the model in `path`, on the CPU.

    dtype "auto" is bfloat16 where the CPU multiplies it and float32 elsewhere. `num_threads` 0 means every core this
    process may use. The compiled engine is kept in `cache_dir`. `native` False forces torch.
    """
    from executor_svc.model import native as engines
    from executor_svc.model import native_decoder
    from executor_svc.model.decoder import TorchDecoder

    if dtype == "auto":
        dtype = torch.bfloat16 if engines.has_fast_bf16() else torch.float32
    num_threads = num_threads or len(os.sched_getaffinity(0))
    kinds = {torch.float32: engines.F32, torch.bfloat16: engines.BF16, "int8": engines.INT8}
    reason = "not wanted" if not native else native_decoder.unsupported(config)
    if reason is None and dtype not in kinds:
        reason = f"{dtype} weights"
    engine = reason or engines.load_engine(cache_dir, num_threads)
    source = WeightSource(Checkpoint(path), config)
    if not isinstance(engine, str):
        return native_decoder.NativeDecoder(
            source, engine, kind=kinds[dtype], num_threads=num_threads, progress=progress
        )
    if dtype == "int8":
        dtype = torch.bfloat16 if engines.has_fast_bf16() else torch.float32
        engine += "; int8 needs it"
    decoder = TorchDecoder(source, dtype=dtype, progress=progress)
    decoder.description += f" (no native engine: {engine})"
    return decoder

"""A checkpoint's parameters in the decoder's own arrangement.

`WeightSource` gives them layer by layer (projections fused, biases zero-filled, norm offsets added), whatever the
checkpoint calls them. It knows no decoder. Nothing is ever unpickled and no code of the model's directory runs.

Parameters are numpy arrays, bfloat16 as elements.py says; tensors.py makes tensors of them where torch computes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import widened

Progress = Callable[[int, int], None]  # layers done, layers in all
Parameter = Any  # np.ndarray, or torch.Tensor after `tensors`


@dataclass
class LinearWeights:
    """y = x @ weight.T + bias; weight is [outputs, inputs] in the type it has on disk, or dequantised to float32."""

    weight: Parameter
    bias: Parameter | None = None


@dataclass
class ExpertWeights:
    """A mixture of experts."""

    router: LinearWeights
    gate_up: list[LinearWeights]
    down: list[LinearWeights]


@dataclass
class LayerWeights:
    """One layer; norms are float32 and None where the family has none."""

    attention_in: Parameter | None
    attention_out: Parameter | None
    mlp_in: Parameter | None
    mlp_out: Parameter | None
    q_norm: Parameter | None
    k_norm: Parameter | None
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
        self.quantised = config.quantised
        self.prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in checkpoint), "model.")
        self.num_embeddings = checkpoint.shape(f"{self.prefix}embed_tokens.weight")[0]
        if self.num_embeddings < config.vocab_size:
            raise StartupError(
                f"{checkpoint.directory}: {self.num_embeddings} embeddings for a vocab_size of {config.vocab_size}"
            )

    def embedding(self) -> Parameter:
        """[vocab_size, hidden_size]; padding rows past the vocabulary are cut off."""
        shape = (self.num_embeddings, self.config.hidden_size)
        return self.checkpoint.array(f"{self.prefix}embed_tokens.weight", shape)[: self.config.vocab_size]

    def head(self) -> LinearWeights:
        """The language-model head: its own tensor, or the embedding where they are tied."""
        rows = {name: self._num_outputs(name) for name in _HEADS}
        name = next((name for name, found in rows.items() if found is not None), None)
        if self.config.tie_embeddings or (self.config.tie_embeddings is None and name is None):
            return LinearWeights(self.embedding())
        if name is None:
            raise StartupError(
                f"{self.checkpoint.directory}: no lm_head.weight, though config.json unties the embeddings"
            )
        found = rows[name] or 0
        if found < self.config.vocab_size:
            raise StartupError(
                f"{self.checkpoint.directory}: {name} has {found} rows for a vocab_size of {self.config.vocab_size}"
            )
        return LinearWeights(self._weight(name, found, self.config.hidden_size)[: self.config.vocab_size])

    def final_norm(self) -> Parameter:
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

    def release(self) -> None:
        """What was read so far need not stay in memory; later reads open the files again."""
        self.checkpoint.close()

    def finish(self) -> None:
        """All layers were read: complain about tensors that none of them used, then close the files."""
        unused = self.quantised.unused if self.quantised is not None else ()
        self.checkpoint.require_all_taken(lambda name: any(part in name for part in _IGNORED) or name.endswith(unused))
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
        weight = self._weight(name, outputs, inputs)
        has_bias = f"{name}.bias" in self.checkpoint
        return LinearWeights(weight, self.checkpoint.array(f"{name}.bias", (outputs,)) if has_bias else None)

    def _num_outputs(self, name: str) -> int | None:
        """Rows of a linear layer's weight, None where the checkpoint has no such layer."""
        stored = None if self.quantised is None else self.quantised.shape(name, self.checkpoint)
        if stored is not None:
            return stored[0]
        plain = f"{name}.weight"
        return next(iter(self.checkpoint.shape(plain)), 0) if plain in self.checkpoint else None

    def _weight(self, name: str, outputs: int, inputs: int) -> np.ndarray:
        """[outputs, inputs], dequantised where need be."""
        if self.quantised is not None and self.quantised.shape(name, self.checkpoint) is not None:
            return self.quantised.weight(name, self.checkpoint, (outputs, inputs)).contiguous().numpy()
        return self.checkpoint.array(f"{name}.weight", (outputs, inputs))

    def _norm(self, name: str, size: int) -> np.ndarray:
        return widened(self.checkpoint.array(name, (size,))) + np.float32(self.config.family.norm_offset)


def each_layer(source: WeightSource, progress: Progress | None) -> Iterator[LayerWeights]:
    """Layer by layer; `progress` hears of each when whoever asked for it comes for the next."""
    num_layers = source.config.num_layers
    for index in range(num_layers):
        yield source.layer(index)
        if progress is not None:
            progress(index + 1, num_layers)


_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_HEADS = ("lm_head", "language_model.lm_head")
_IGNORED = ("rotary_emb.inv_freq", "lm_head.", "vision_tower.", "multi_modal_projector.")


def fuse(parts: list[LinearWeights]) -> LinearWeights:
    """Several projections of the same input as one; where their types differ, in float32."""
    weight = _joined([part.weight for part in parts])
    if all(part.bias is None for part in parts):
        return LinearWeights(weight)
    biases = [np.zeros(len(part.weight), part.weight.dtype) if part.bias is None else part.bias for part in parts]
    return LinearWeights(weight, _joined(biases))


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    if len({array.dtype for array in arrays}) > 1:
        arrays = [widened(array) for array in arrays]
    return np.concatenate(arrays)

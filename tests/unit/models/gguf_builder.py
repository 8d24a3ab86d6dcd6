"""Tiny GGUF files made from tiny transformers models, the way llama.cpp's converter makes them.

Independent of what is tested: names come from the gguf package's own table, layouts are written down again from
llama.cpp's converter.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

INTERLEAVED = ("llama", "smollm3", "granite")
ARCHES = {"gemma3_text": "gemma3"}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass
class Vocab:
    """A byte-level vocabulary unless told otherwise."""

    model: str = "gpt2"
    pre: str | None = "gpt-2"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.08)
            if "norm" in name and not model_type.startswith("gemma"):
                weight.add_(1.0)
    return model


def write_model(path: Path, model: PreTrainedModel, keys: dict[str, Any] | None = None, **options: Any) -> Path:
    """`keys`: more metadata of the architecture; options: quantise (Type), vocab, extra_tensors, skip."""
    config = model.config
    arch = ARCHES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in (keys or {}).items():
        add_value(writer, f"{arch}.{key}" if not key.startswith(("general.", "tokenizer.")) else key, value)
    write_vocab(writer, options.get("vocab") or letters())
    add_weights(writer, arch, model, options)
    for name, array in options.get("extra_tensors", {}).items():
        writer.add_tensor(name, array)
    close(writer)
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](key, value)


def add_weights(writer: gguf.GGUFWriter, arch: str, model: PreTrainedModel, options: dict[str, Any]) -> None:
    enum = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(enum, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        if target in options.get("skip", ()):
            continue
        array = as_file_has_it(arch, name, tensor.numpy(), model.config)
        kind = options.get("quantise", Type.F32) if array.ndim == 2 else Type.F32
        if kind is Type.F32:
            writer.add_tensor(target, np.ascontiguousarray(array))
        else:
            writer.add_tensor(target, gguf.quants.quantize(array, kind), raw_dtype=kind)


def as_file_has_it(arch: str, name: str, array: np.ndarray, config: Any) -> np.ndarray:
    if arch in INTERLEAVED and ("q_proj" in name or "k_proj" in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    if arch.startswith("gemma") and "norm" in name:
        return array + np.float32(1)
    return array


def write_vocab(writer: gguf.GGUFWriter, vocab: Vocab) -> None:
    writer.add_tokenizer_model(vocab.model)
    if vocab.pre is not None:
        writer.add_tokenizer_pre(vocab.pre)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.types)
    if vocab.merges:
        writer.add_token_merges(vocab.merges)
    if vocab.scores:
        writer.add_token_scores(vocab.scores)
    for key, value in vocab.extra.items():
        add_value(writer, f"tokenizer.{key}" if key == "chat_template" else f"tokenizer.ggml.{key}", value)


def letters() -> Vocab:
    """96 tokens: three control tokens, letters, digits, some merges; the smallest that works."""
    tokens = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz0123456789", "\u0120"]
    merges = ["t h", "th e", "\u0120 a"]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [3, 3, 3] + [1] * (len(tokens) - 3)
    extra = {"bos_token_id": 1, "eos_token_id": 2, "padding_token_id": 0}
    return Vocab(tokens=tokens, types=types, merges=merges, extra=extra)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

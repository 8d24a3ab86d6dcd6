"""What a model weighs and what a token of it keeps, from its configuration alone: decoders with a gated MLP.

    parameters    embedding + layers * (q, k, v, o projections + 3 * hidden * intermediate + norms) (+ head, if untied)
    KV of a token 2 * layers * kv heads * head size * bytes of the KV type

Experts of mixtures are all counted as weights; a step of many rows reads most of them. A quantised checkpoint counts as
what it becomes: executors dequantise it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.errors import StartupError

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}


@dataclass(frozen=True, slots=True)
class ModelSize:
    name: str
    num_params: int
    # Of them those that compute a token (all but the rows of the embedding that are only looked up).
    num_active: int
    kv_values_per_token: int
    vocab_size: int
    max_model_len: int

    def weight_bytes(self, dtype: str) -> int:
        return round(self.num_params * BYTES[dtype])

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        return round(self.kv_values_per_token * BYTES[kv_dtype])


def read_size(directory: Path) -> ModelSize:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return size_of(directory.name, config)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} does not describe a decoder: {type(error).__name__} {error}") from None


def size_of(name: str, config: dict[str, Any]) -> ModelSize:
    """Raises KeyError for what is missing."""
    config = config.get("text_config", config)
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    used = config.get("num_experts_per_tok") or 1
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    expert = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
    norms = 2 * hidden
    embedding = vocab * hidden
    head_rows = 0 if config.get("tie_word_embeddings", False) else embedding
    return ModelSize(
        name=name,
        num_params=embedding + head_rows + hidden + layers * (attention + experts * expert + norms),
        num_active=embedding + layers * (attention + used * expert),
        kv_values_per_token=2 * layers * kv_heads * head,
        vocab_size=vocab,
        max_model_len=config.get("max_position_embeddings") or 8192,
    )

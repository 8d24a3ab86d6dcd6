"""A model's config.json as one checked, frozen value.

Reads the files of a Hugging Face model directory, old spellings and new; knows nothing of weights or tensors. Every
number is a bounded Python int before anything is computed from it.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.errors import StartupError
from executor_svc.model.families import FAMILIES, Family
from executor_svc.model.quantised import Method, read_method

MAX_DIMENSION = 1 << 24  # far above any real model; keeps every product of two within 64 bits
MAX_LAYERS = 4096


@dataclass(frozen=True)
class RopeSpec:
    """Parameters of one rotary embedding, as config.json gives them."""

    theta: float
    dim: int  # how many of a head's leading elements rotate
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """One scaling parameter, `default` where absent or null."""
        value = dict(self.scaling).get(key)
        return default if value is None else value


@dataclass(frozen=True)
class LayerSpec:
    """What differs between layers of one model."""

    window: int | None  # a query sees itself and window - 1 positions before it
    rope: int | None  # index into ModelConfig.ropes; None: positions are not encoded
    is_sparse: bool  # a mixture of experts in place of the MLP


@dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know about a model except its weights."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    activation: str
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    tie_embeddings: bool | None  # None: the config does not say, the checkpoint decides
    attention_scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0  # logits are multiplied by it
    num_experts: int = 0
    num_active_experts: int = 0
    expert_size: int = 0
    renormalise_experts: bool = True
    quantised: Method | None = None  # how the checkpoint stores linear layers; None: as they are

    @property
    def family(self) -> Family:
        """The table row of this architecture."""
        return FAMILIES[self.architecture]

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_directory(cls, path: str | Path) -> "ModelConfig":
        """The config of the model in `path`; StartupError when it is missing, unreadable or not supported."""
        file, raw = Path(path) / "config.json", read_config(path)
        try:
            return cls.from_dict(raw, str(file))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StartupError(f"{file} holds a value of the wrong kind: {error}") from None

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json") -> "ModelConfig":
        """The config from parsed JSON; `source` names the file in error messages."""
        architecture = architecture_of(raw, source)
        if architecture not in FAMILIES:
            raise StartupError(
                f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(sorted(FAMILIES))}, "
                "and on the cpu backend what transformers computes"
            )
        family = FAMILIES[architecture]
        if isinstance(raw.get("text_config"), dict):
            raw = {**raw, **raw["text_config"]}
        reader = _Reader({**dict(family.defaults), **{k: v for k, v in raw.items() if v is not None}}, source)
        hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
        head_dim = reader.integer("head_dim", hidden_size // num_heads)
        num_kv_heads = reader.integer("num_key_value_heads", num_heads)
        num_layers = reader.integer("num_hidden_layers", limit=MAX_LAYERS)
        if num_heads % num_kv_heads:
            raise StartupError(
                f"{source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise StartupError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one")
        layers, ropes = _layers_and_ropes(reader, family, num_layers, head_dim)
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.integer("intermediate_size"),
            vocab_size=reader.integer("vocab_size"),
            max_position=reader.integer("max_position_embeddings", 2048),
            norm_eps=reader.number("rms_norm_eps", 1e-6),
            activation=reader.activation(family),
            layers=layers,
            ropes=ropes,
            tie_embeddings=reader.values.get("tie_word_embeddings"),
            quantised=read_method(reader.values.get("quantization_config"), source),
            **_scales(reader, family, hidden_size, head_dim),
            **_experts(reader, family),
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of the model in `path`, not yet checked beyond being an object."""
    file = Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} holds no config.json: give a Hugging Face model directory") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise StartupError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise StartupError(f"{file} is not a JSON object")
    return raw


def architecture_of(raw: dict[str, Any], source: str = "config.json") -> str:
    """The architecture that a parsed config.json names."""
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise StartupError(f'{source} names no architecture: its "architectures" must list one')
    return names[0]


class _Reader:
    """Checked access to config values; every complaint names the key, its value and the range."""

    def __init__(self, values: dict[str, Any], source: str):
        self.values = values
        self.source = source

    def integer(self, key: str, default: int | None = None, limit: int = MAX_DIMENSION) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise StartupError(f"{self.source}: {key} is {value!r}; it must be an integer from 1 to {limit}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise StartupError(f"{self.source}: {key} is {value!r}; it must be a finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key, 0.0) if key in self.values else None

    def activation(self, family: Family) -> str:
        known = {
            "silu": "silu",
            "swish": "silu",
            "gelu": "gelu",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu_new": "gelu_tanh",
        }
        name = self.values.get(family.activation_key, self.values.get("hidden_act", "silu"))
        if name not in known:
            raise StartupError(f"{self.source}: activation {name!r} is not supported; supported: {', '.join(known)}")
        return known[name]


def _scales(reader: _Reader, family: Family, hidden_size: int, head_dim: int) -> dict[str, Any]:
    embedding = {"one": 1.0, "sqrt_hidden": hidden_size**0.5, "config": reader.number("embedding_multiplier", 1.0)}
    attention = {
        "head_dim": head_dim**-0.5,
        "query_pre_attn_scalar": max(reader.number("query_pre_attn_scalar", head_dim), 1e-9) ** -0.5,
        "attention_multiplier": reader.number("attention_multiplier", 1.0),
    }
    return {
        "embedding_scale": embedding[family.embedding_scale],
        "attention_scale": attention[family.attention_scale],
        "residual_scale": reader.number("residual_multiplier", 1.0),
        "logits_scale": 1.0 / (reader.number("logits_scaling", 1.0) or 1.0),
        "attention_softcap": reader.optional_number("attn_logit_softcapping"),
        "logits_softcap": reader.optional_number("final_logit_softcapping"),
    }


def _experts(reader: _Reader, family: Family) -> dict[str, Any]:
    if family.experts is None:
        return {}
    present = [key for key in family.experts.count_keys if key in reader.values]
    count = reader.integer(present[0] if present else family.experts.count_keys[0], limit=4096)
    renormalise = family.experts.renormalise
    return {
        "num_experts": count,
        "num_active_experts": reader.integer("num_experts_per_tok", 2, limit=count),
        "expert_size": reader.integer(family.experts.width_keys[0]),
        "renormalise_experts": bool(reader.values.get("norm_topk_prob", False)) if renormalise is None else renormalise,
    }


def _layers_and_ropes(
    reader: _Reader, family: Family, num_layers: int, head_dim: int
) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """Which layers have a window, which rotary embedding each uses, and which hold experts."""
    values = reader.values
    windows = _windows(reader, family, num_layers)
    ropes, local_rope = _ropes(reader, head_dim)
    nope = values.get(family.nope_key) if family.nope_key else None
    if family.nope_key and nope is None:
        interval = reader.integer("no_rope_layer_interval", 4)
        nope = [int((i + 1) % interval != 0) for i in range(num_layers)]
    dense = set(values.get("mlp_only_layers", ()))
    step = reader.integer("decoder_sparse_step", 1)
    layers = tuple(
        LayerSpec(
            window=windows[i],
            rope=None if nope is not None and not nope[i] else (local_rope if windows[i] is not None else 0),
            is_sparse=family.experts is not None and i not in dense and (i + 1) % step == 0,
        )
        for i in range(num_layers)
    )
    return layers, ropes


def _windows(reader: _Reader, family: Family, num_layers: int) -> list[int | None]:
    values = reader.values
    if "sliding_window" not in values or (family.window_switch and not values.get(family.window_switch)):
        return [None] * num_layers
    window = reader.integer("sliding_window")
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) < num_layers:
            raise StartupError(f"{reader.source}: layer_types lists {len(kinds)} layers of {num_layers}")
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise StartupError(f"{reader.source}: layer type {sorted(map(str, unknown))[0]!r} is not supported")
        return [window if kinds[i] == "sliding_attention" else None for i in range(num_layers)]
    if family.full_every:
        every = reader.integer("sliding_window_pattern", family.full_every)
        return [window if (i + 1) % every else None for i in range(num_layers)]
    first = 0 if family.window == "all" else int(values.get("max_window_layers", 28))
    return [window if i >= first else None for i in range(num_layers)]


def _ropes(reader: _Reader, head_dim: int) -> tuple[tuple[RopeSpec, ...], int]:
    """The rotary embeddings, and the index of the one that layers with a window use."""
    values = reader.values
    parameters = values.get("rope_parameters")
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        full: dict[str, Any] = parameters["full_attention"]
        local: dict[str, Any] = parameters.get("sliding_attention", full)
        return (_rope(reader, full, head_dim), _rope(reader, local, head_dim)), 1
    flat: dict[str, Any] = parameters if isinstance(parameters, dict) else values.get("rope_scaling", {})
    rope = _rope(reader, flat, head_dim)
    if "rope_local_base_freq" in values:
        return (rope, RopeSpec(reader.number("rope_local_base_freq", 10_000.0), rope.dim)), 1
    return (rope,), 0


def _rope(reader: _Reader, parameters: dict[str, Any], head_dim: int) -> RopeSpec:
    values = reader.values
    scaling = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items()}
    theta = scaling.get("rope_theta", values.get("rope_theta", 10_000.0))
    fraction = scaling.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if (
        not isinstance(theta, int | float)
        or not theta > 0
        or not isinstance(fraction, int | float)
        or not 0 < fraction <= 1
    ):
        raise StartupError(
            f"{reader.source}: rope_theta {theta!r} or partial_rotary_factor {fraction!r} is out of range"
        )
    scaling.setdefault("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return RopeSpec(float(theta), int(head_dim * fraction), str(kind), tuple(sorted(scaling.items())))

"""How the supported model families differ, as data.

Every family is the same decoder: embed; per layer attention and MLP around a residual stream; a last norm; a head.
A row of `FAMILIES` says which optional parts exist and what the checkpoint calls them. Layers and loader read the row;
neither knows a family by name.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class NormNames:
    """Checkpoint names of a layer's norms; None where the family has none at that place."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None  # before the residual addition
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None  # before the residual addition


@dataclass(frozen=True)
class ExpertNames:
    """Checkpoint names of a mixture of experts under a layer; {e} is the expert's number."""

    router: str
    gate: str
    up: str
    down: str
    count_keys: tuple[str, ...]  # config keys for the number of experts
    width_keys: tuple[str, ...]  # config keys for one expert's width
    renormalise: bool | None  # of the chosen experts' weights; None: the config's norm_topk_prob


@dataclass(frozen=True)
class Family:
    """One row: where this family departs from Llama."""

    norms: NormNames = field(default_factory=NormNames)
    norm_offset: float = 0.0  # Gemma stores w - 1
    qk_norm: Literal["none", "head", "full"] = "none"  # per head (Qwen3), over the whole projection (OLMo2)
    fused_projections: bool = False  # qkv_proj and gate_up_proj on disk (Phi-3)
    embedding_scale: Literal["one", "sqrt_hidden", "config"] = "one"
    attention_scale: Literal["head_dim", "query_pre_attn_scalar", "attention_multiplier"] = "head_dim"
    activation_key: str = "hidden_act"
    window: Literal["all", "layers"] = "layers"  # a config without layer_types: every layer, or by full_every
    window_switch: str | None = None  # config flag that must be true for any window
    full_every: int = 0  # the i-th, 2i-th, ... layer sees everything (when the config has no layer_types)
    nope_key: str | None = None  # config list: 0 where a layer has no rotary embedding
    experts: ExpertNames | None = None
    defaults: tuple[tuple[str, object], ...] = ()  # values transformers assumes for missing keys


_SANDWICH = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_QWEN_WINDOW = {"window": "layers", "window_switch": "use_sliding_window"}

_LLAMA = Family()
_GEMMA = {
    "norms": _SANDWICH,
    "norm_offset": 1.0,
    "embedding_scale": "sqrt_hidden",
    "attention_scale": "query_pre_attn_scalar",
    "activation_key": "hidden_activation",
}
_GEMMA_DEFAULTS = (
    ("tie_word_embeddings", True),
    ("head_dim", 256),
    ("query_pre_attn_scalar", 256),
    ("sliding_window", 4096),
    ("hidden_activation", "gelu_pytorch_tanh"),
    ("rms_norm_eps", 1e-6),
)
_GEMMA3 = Family(
    **_GEMMA,  # type: ignore[arg-type]
    qk_norm="head",
    full_every=6,
    defaults=(
        *_GEMMA_DEFAULTS,
        ("rope_theta", 1_000_000.0),
        ("rope_local_base_freq", 10_000.0),
        ("max_position_embeddings", 131_072),
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
    ),
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Family(window="all"),
    "Qwen2ForCausalLM": Family(**_QWEN_WINDOW),  # type: ignore[arg-type]
    "Qwen3ForCausalLM": Family(**_QWEN_WINDOW, qk_norm="head", defaults=(("head_dim", 128),)),  # type: ignore[arg-type]
    "SmolLM3ForCausalLM": Family(
        **_QWEN_WINDOW,  # type: ignore[arg-type]
        nope_key="no_rope_layers",
        defaults=(("rope_theta", 2_000_000.0), ("tie_word_embeddings", True)),
    ),
    "Gemma2ForCausalLM": Family(
        **_GEMMA,  # type: ignore[arg-type]
        full_every=2,
        defaults=(*_GEMMA_DEFAULTS, ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": Family(fused_projections=True, window="all", defaults=(("rms_norm_eps", 1e-5),)),
    "Olmo2ForCausalLM": Family(
        norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="full",
        defaults=(("rms_norm_eps", 1e-5),),
    ),
    "GraniteForCausalLM": Family(embedding_scale="config", attention_scale="attention_multiplier"),
    "MixtralForCausalLM": Family(
        window="all",
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{e}.w1",
            up="block_sparse_moe.experts.{e}.w3",
            down="block_sparse_moe.experts.{e}.w2",
            count_keys=("num_local_experts",),
            width_keys=("intermediate_size",),
            renormalise=True,
        ),
        defaults=(("rms_norm_eps", 1e-5), ("rope_theta", 1_000_000.0)),
    ),
    "Qwen3MoeForCausalLM": Family(
        **_QWEN_WINDOW,  # type: ignore[arg-type]
        qk_norm="head",
        experts=ExpertNames(
            router="mlp.gate",
            gate="mlp.experts.{e}.gate_proj",
            up="mlp.experts.{e}.up_proj",
            down="mlp.experts.{e}.down_proj",
            count_keys=("num_experts", "num_local_experts"),
            width_keys=("moe_intermediate_size",),
            renormalise=None,
        ),
    ),
}

"""GGUF metadata -> config.json and generation_config.json, as Hugging Face directories have them.

It reads metadata and tensor shapes, never weights, except the three small tensors that hold rotary factors.
"""

from typing import Any

import numpy as np

from scheduler_svc.errors import StartupError
from scheduler_svc.models.gguf_file import GgufFile
from scheduler_svc.models.gguf_tensors import LAYOUTS, PLAIN, expand

# GGUF architecture -> (model_type, class); `llama` covers Llama 2/3, Mistral, SmolLM 1/2 and their kin.
FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# Llama 3.1 and later bend the rotary frequencies; the file keeps only the resulting factors.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


class Metadata:
    """Metadata of one architecture, with errors that name the key and the file."""

    def __init__(self, file: GgufFile):
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in FAMILIES or architecture not in LAYOUTS:
            raise StartupError(
                f"{file.path}: architecture {architecture!r} is not supported from GGUF; "
                f"supported: {', '.join(sorted(FAMILIES))}"
            )
        self.architecture: str = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise StartupError(
                f"{self.file.path}: {self.architecture}.{key} is {value!r}, a positive integer is needed"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise StartupError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, a positive number is needed")
        # The shortest decimal of the float32 in the file: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value)))


def model_config(file: GgufFile) -> dict[str, Any]:
    meta = Metadata(file)
    if meta.get("expert_count", 0):
        raise StartupError(f"{file.path} is a mixture of experts, which is not supported from GGUF")
    model_type, class_name = FAMILIES[meta.architecture]
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", default=max(1, hidden // heads))
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.integer("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": meta.number("rope.freq_base", default=10000.0),
        "torch_dtype": _dtype(file),
        **special_ids(file),
    }
    if "blk.0.attn_q.bias" in file.tensors and model_type != "qwen2":
        config["attention_bias"] = True
    _rope(meta, config, head_dim)
    _family(meta, config, head_dim)
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Ids only: GGUF files carry no sampling defaults. The end of a turn ends generation too."""
    ids = special_ids(file)
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != ids.get("eos_token_id"):
        ids["eos_token_id"] = [ids["eos_token_id"], turn] if "eos_token_id" in ids else turn
    return {"_from_model_config": True, **ids}


def special_ids(file: GgufFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {}
    for ours, theirs in names.items():
        value = file.metadata.get(f"tokenizer.ggml.{theirs}")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < _vocab_size(file):
            raise StartupError(f"{file.path}: tokenizer.ggml.{theirs} is {value!r}, outside the vocabulary")
        found[ours] = value
    return found


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path} has no tensor 'token_embd.weight': it holds no language model")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str:
    kind = file.tensors["token_embd.weight"].type
    return {"F16": "float16", "BF16": "bfloat16"}.get(PLAIN.get(kind, ""), "float32")


def _rope(meta: Metadata, config: dict[str, Any], head_dim: int) -> None:
    rotary = meta.integer("rope.dimension_count", default=head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    kind = meta.get("rope.scaling.type", "none")
    # `rope.scale_linear` is the older spelling of a linear factor.
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear")
    if "rope_freqs.weight" in meta.file.tensors:
        config["rope_scaling"] = _llama3_scaling(meta, config["rope_theta"], rotary)
    elif "rope_factors_long.weight" in meta.file.tensors:
        config["original_max_position_embeddings"] = meta.integer("rope.scaling.original_context_length")
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _factors(meta.file, "rope_factors_long.weight"),
            "short_factor": _factors(meta.file, "rope_factors_short.weight"),
        }
    elif kind == "yarn":
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": float(factor or 1.0),
            "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        }
    elif kind == "linear" or (factor and kind == "none"):
        config["rope_scaling"] = {"rope_type": "linear", "factor": float(factor or 1.0)}
    elif kind not in ("none", "longrope"):
        raise StartupError(f"{meta.file.path}: rope scaling {kind!r} is not supported")


def _factors(file: GgufFile, name: str) -> list[float]:
    info = file.tensors.get(name)
    if info is None:
        raise StartupError(f"{file.path} lacks the tensor {name!r}: the file is incomplete; fetch it again")
    return [float(str(value)) for value in expand(file.rows(info), info.type).ravel()]


def _llama3_scaling(meta: Metadata, theta: float, rotary: int) -> dict[str, Any]:
    factors = np.array(_factors(meta.file, "rope_freqs.weight"))
    factor = float(factors.max())
    if factors.shape != (rotary // 2,) or not np.allclose(factors, llama3_factors(theta, rotary, factor), rtol=1e-4):
        raise StartupError(
            f"{meta.file.path}: its rotary factors are not those of Llama 3; use its Hugging Face directory"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL,
    }


def llama3_factors(theta: float, rotary: int, factor: float) -> np.ndarray:
    """What each rotary frequency is divided by: 1 for short waves, `factor` for long ones, a ramp between."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, rotary, 2) / rotary)
    ramp = (LLAMA3_ORIGINAL / wavelength - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    ramp = np.clip(ramp, 0.0, 1.0)
    return 1 / ((1 - ramp) / factor + ramp)


def _family(meta: Metadata, config: dict[str, Any], head_dim: int) -> None:
    """What one family has beyond the common decoder."""
    match meta.architecture:
        case "granite":
            config |= {
                "attention_multiplier": meta.number("attention.scale"),
                "embedding_multiplier": meta.number("embedding_scale"),
                "residual_multiplier": meta.number("residual_scale"),
                "logits_scaling": meta.number("logit_scale"),
            }
        case "smollm3":
            # Every fourth layer goes without rotary embedding; llama.cpp has the same constant.
            config["no_rope_layer_interval"] = 4
            config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
        case "phi3":
            window = meta.get("attention.sliding_window")
            config["sliding_window"] = window if window and window < config["max_position_embeddings"] else None
        case "gemma2":
            _gemma(meta, config)
            wide = config["hidden_size"] // config["num_attention_heads"]
            config["query_pre_attn_scalar"] = wide if config["num_hidden_layers"] == 46 else head_dim
            config["attn_logit_softcapping"] = meta.number("attn_logit_softcapping", default=50.0)
            config["final_logit_softcapping"] = meta.number("final_logit_softcapping", default=30.0)
        case "gemma3":
            _gemma(meta, config)
            wide = config["hidden_size"] // config["num_attention_heads"]
            config["query_pre_attn_scalar"] = wide if config["num_hidden_layers"] == 62 else head_dim
            config["rope_local_base_freq"] = 10000.0
            config["sliding_window_pattern"] = 6


def _gemma(meta: Metadata, config: dict[str, Any]) -> None:
    del config["hidden_act"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["sliding_window"] = meta.integer("attention.sliding_window", default=4096)

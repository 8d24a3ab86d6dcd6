"""Can transformers compute this model in our way? Answered from config.json and transformers' classes alone."""

import inspect
from dataclasses import dataclass
from typing import Any

from executor_svc.errors import StartupError
from executor_svc.model.quantised import Method, read_method

MAX_LAYERS, MAX_SIZE = 4096, 1 << 24
LAYER_TYPES = {"full_attention", "sliding_attention"}
BOUNDED = {
    "num_hidden_layers": MAX_LAYERS,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), MAX_LAYERS),
    **dict.fromkeys(("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"), MAX_SIZE),
    **dict.fromkeys(("head_dim", "intermediate_size", "max_position_embeddings"), MAX_SIZE),
}
# What a config could make transformers do beside building the model: fetch kernels, load code, fuse modules.
REMOVED = {"auto_map", "attn_implementation", "experts_implementation", "quantization_config", "fusion_config"}
REMOVED |= {"transformers_weights", "distributed_config", "kernel_config", "base_model_tp_plan", "custom_pipelines"}


@dataclass(frozen=True)
class Description:
    """A model that can be built; `config` and `model_class` are transformers'."""

    architecture: str
    config: Any
    model_class: Any
    vocab_size: int
    max_position: int
    quantised: Method | None = None  # how the checkpoint stores linear layers; None: as they are


def describe(raw: dict[str, Any], source: str) -> Description:
    """The description of the model of a config.json; StartupError says why there is none."""
    architecture = str(raw["architectures"][0])
    quantised = read_method(raw.get("quantization_config"), source)
    config = _build_config(raw, source, architecture)
    model_class = _model_class(config, source, architecture)
    text = config.get_text_config(decoder=True)
    for name, limit in BOUNDED.items():
        value = getattr(text, name, None)
        if value is not None and (not isinstance(value, int) or not 0 <= value <= limit):
            raise StartupError(f"{source}: {name} is {value!r}; it must be an integer from 0 to {limit}")
    _check_kind(config, text, model_class, source, architecture)
    return Description(
        architecture, config, model_class, int(text.vocab_size), longest_position(text, source), quantised
    )


def _refusal(source: str, architecture: str, reason: str) -> StartupError:
    return StartupError(f"{source}: architecture {architecture!r} is not supported: {reason}")


def _build_config(raw: dict[str, Any], source: str, architecture: str) -> Any:
    try:
        import transformers
        from transformers import CONFIG_MAPPING
    except ImportError:
        raise _refusal(source, architecture, "it is not in the table, and transformers is not installed") from None
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own_code = ", and code of the model's folder is never run" if "auto_map" in raw else ""
        raise _refusal(
            source,
            architecture,
            f"transformers {transformers.__version__} has no model_type {model_type!r}{own_code}",
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(_harmless(raw))
    except Exception as error:
        raise StartupError(f"{source}: transformers refuses it: {first_line(error)}") from None


def _harmless(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _harmless(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if key not in REMOVED and not key.startswith("_")
    }


def _model_class(config: Any, source: str, architecture: str) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.is_encoder_decoder:
        raise _refusal(source, architecture, "it is an encoder and a decoder, only decoders are served")
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    classes = found if isinstance(found, list | tuple) else (found,)
    for model_class in classes:
        if model_class is not None and model_class.__name__ == architecture:
            return model_class
    raise _refusal(source, architecture, "it is no causal language model of transformers")


def _check_kind(config: Any, text: Any, model_class: Any, source: str, architecture: str) -> None:
    if model_class._is_stateful:
        raise _refusal(source, architecture, "it keeps a state that is no KV cache (state space or linear attention)")
    other = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - LAYER_TYPES)
    if other:
        raise _refusal(source, architecture, f"its layers of type {other[0]!r} are neither full nor sliding attention")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise _refusal(source, architecture, "it cannot be told the positions of its tokens")


def longest_position(text: Any, source: str) -> int:
    """Positions that are computed the same whatever else is in the batch: up to where dynamic scaling would begin."""
    longest = getattr(text, "max_position_embeddings", None) or 2048
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and isinstance(original, int):
            longest = min(longest, original)
    if longest < 2:
        raise StartupError(f"{source}: max_position_embeddings is {longest}; it must be at least 2")
    return longest


def first_line(error: Exception) -> str:
    """What another library has to say, short enough for one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"

"""Tiny random checkpoints of three families, as files. Importing transformers for them would cost too much."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SEED = 20261129
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
}
GEMMA2 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], **GEMMA2},
}
NORMS = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "gemma2": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def make_checkpoint(directory: Path, family: str, **overrides: Any) -> None:
    """config.json and model.safetensors of a float32 model of `family`, the same weights whenever it is made."""
    config = {**COMMON, **FAMILIES[family], "model_type": family, "dtype": "float32", **overrides}
    generator = torch.Generator().manual_seed(SEED)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_size, kv_size = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def matrix(outputs: int, inputs: int, scale: float) -> torch.Tensor:
        return torch.randn((outputs, inputs), generator=generator) * scale

    def norm(size: int) -> torch.Tensor:
        # Gemma stores how much more than one a weight is.
        return (family != "gemma2") + 0.1 * torch.randn(size, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(vocab, width, 1.5), "model.norm.weight": norm(width)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, width, 1.2 * width**-0.5)
    shapes = {
        "self_attn.q_proj": (q_size, width),
        "self_attn.k_proj": (kv_size, width),
        "self_attn.v_proj": (kv_size, width),
        "self_attn.o_proj": (width, q_size),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        for name, (outputs, inputs) in shapes.items():
            weights[f"{layer}{name}.weight"] = matrix(outputs, inputs, 1.2 * inputs**-0.5)
        for name in NORMS[family]:
            weights[f"{layer}{name}.weight"] = norm(width)
        if family == "qwen3":
            for name in ("q_norm", "k_norm"):
                weights[f"{layer}self_attn.{name}.weight"] = norm(config["head_dim"])
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))

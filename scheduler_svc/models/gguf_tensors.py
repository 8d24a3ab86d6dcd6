"""GGUF tensors as Hugging Face tensors: names, layouts undone, quantised blocks expanded.

What llama.cpp's converter changes and this undoes:
  names           blk.3.attn_q.weight            -> model.layers.3.self_attn.q_proj.weight
  rotary pairs    llama-like models: rows of q and k of each head are interleaved (a0 b0 a1 b1 ...) in the file and
                  halved (a0 a1 ... b0 b1 ...) in Hugging Face directories
  norms           Gemma: the file holds w + 1
F32, F16 and BF16 keep their type; everything quantised becomes float32, which holds it exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from scheduler_svc.errors import StartupError
from scheduler_svc.models.gguf_file import GgufFile, TensorInfo
from scheduler_svc.models.safetensors_io import TensorSpec

Type = GGMLQuantizationType
PLAIN = {Type.F32: "F32", Type.F16: "F16", Type.BF16: "BF16", Type.F64: "F64"}
# Expanded bytes made at a time: memory stays here whatever the tensor's size.
CHUNK_BYTES = 8 << 20
# Not weights: their content goes into the config.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one architecture's tensors are laid out in a GGUF file."""

    blocks: dict[str, str]
    rotary_interleaved: bool = False
    norm_offset: float = 0.0


LAYOUTS = {
    "llama": Layout(_LINEAR | _PRE_NORMS, rotary_interleaved=True),
    "smollm3": Layout(_LINEAR | _PRE_NORMS, rotary_interleaved=True),
    "granite": Layout(_LINEAR | _PRE_NORMS, rotary_interleaved=True),
    "qwen2": Layout(_LINEAR | _PRE_NORMS),
    "qwen3": Layout(_LINEAR | _PRE_NORMS | _QK_NORMS),
    "olmo2": Layout(_LINEAR | _POST_NORMS | _QK_NORMS),
    "phi3": Layout(_FUSED | _PRE_NORMS),
    "gemma2": Layout(_LINEAR | _SANDWICH_NORMS, norm_offset=1.0),
    "gemma3": Layout(_LINEAR | _SANDWICH_NORMS | _QK_NORMS, norm_offset=1.0),
}

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_name(name: str, layout: Layout) -> str | None:
    """The Hugging Face name of a GGUF tensor; None: this architecture has no such tensor."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    index, _, part = rest.partition(".")
    if block != "blk" or not index.isdecimal() or part not in layout.blocks:
        return None
    return f"model.layers.{index}.{layout.blocks[part]}.{suffix}"


def tensor_specs(file: GgufFile, config: dict) -> list[TensorSpec]:
    """Every weight of the model, in file order. `config` is the Hugging Face config made from the same file."""
    architecture = file.metadata["general.architecture"]
    layout = LAYOUTS[architecture]
    specs = []
    for info in file.tensors.values():
        if info.name in CONFIG_TENSORS:
            continue
        name = hf_name(info.name, layout)
        if name is None:
            raise StartupError(
                f"{file.path}: tensor {info.name!r} is unknown for architecture {architecture!r}; "
                "use the model's Hugging Face directory"
            )
        specs.append(_spec(file, info, name, layout, config))
    _check_complete({spec.name: spec.shape for spec in specs}, config, file)
    return specs


def _spec(file: GgufFile, info: TensorInfo, name: str, layout: Layout, config: dict) -> TensorSpec:
    order = None
    if layout.rotary_interleaved and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
        size = info.shape[0]
        if size % (2 * heads):
            raise StartupError(f"{file.path}: {info.name!r} has {size} rows, no multiple of 2 x {heads} heads")
        order = halved_order(size, heads)
    offset = layout.norm_offset if "norm" in name else 0.0
    dtype = "F32" if offset else PLAIN.get(info.type, "F32")
    if dtype == "F32" and info.type is not Type.F32:
        _check_dequantises(info, file)
    return TensorSpec(name, dtype, info.shape, partial(_chunks, file, info, order, offset))


def halved_order(num_rows: int, num_heads: int) -> np.ndarray:
    """For each row of the Hugging Face tensor, the row of the file that holds it."""
    by_head = np.arange(num_rows).reshape(num_heads, -1, 2)
    return by_head.transpose(0, 2, 1).reshape(-1)


def _chunks(file: GgufFile, info: TensorInfo, order: np.ndarray | None, offset: float) -> Iterator[np.ndarray]:
    raw = file.rows(info)
    if len(info.shape) == 1 and order is not None:
        # A bias: its elements are what a matrix has as rows.
        raw = raw.reshape(info.shape[0], -1)
    step = max(1, CHUNK_BYTES // (4 * info.shape[-1]))
    for start in range(0, len(raw), step):
        rows = raw[start : start + step] if order is None else raw[order[start : start + step]]
        if offset:
            yield expand(rows, info.type) - np.float32(offset)
        else:
            yield rows if info.type in PLAIN else expand(rows, info.type)


def expand(rows: np.ndarray, kind: Type) -> np.ndarray:
    """Raw rows (uint8) as float32."""
    if kind is Type.F32:
        return rows.view(np.float32)
    if kind is Type.F16:
        return rows.view(np.float16).astype(np.float32)
    return quants.dequantize(rows, kind).astype(np.float32, copy=False)


def _check_dequantises(info: TensorInfo, file: GgufFile) -> None:
    """One block of zeros through the gguf package tells whether it can expand this type."""
    if info.type in PLAIN:
        return
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[info.type][1]), np.uint8), info.type)
    except (NotImplementedError, KeyError):
        raise StartupError(
            f"{file.path}: tensor {info.name!r} is stored as {info.type.name}, which cannot be expanded; "
            "use another quantisation of the model, such as Q8_0 or Q4_K_M"
        ) from None


def _check_complete(shapes: dict[str, tuple[int, ...]], config: dict, file: GgufFile) -> None:
    """Each tensor that the config promises is there, in the shape it promises."""
    for name, expected in _expected_shapes(config).items():
        if name not in shapes:
            raise StartupError(f"{file.path} lacks the tensor for {name!r}: the file is incomplete; fetch it again")
        if shapes[name] != expected:
            raise StartupError(
                f"{file.path}: {name!r} has shape {list(shapes[name])}, its metadata says {list(expected)}"
            )


def _expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    vocab = config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    per_layer = {"self_attn.o_proj": (hidden, q_rows), "mlp.down_proj": (hidden, inner)}
    if config["model_type"] == "phi3":
        per_layer |= {"self_attn.qkv_proj": (q_rows + 2 * kv_rows, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
    else:
        per_layer |= {
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
        }
    for layer in range(config["num_hidden_layers"]):
        for part, shape in per_layer.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    return shapes

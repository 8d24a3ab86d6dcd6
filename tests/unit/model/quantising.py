"""Published formats of quantised checkpoints, written element by element in numpy: (tensors, the weight they mean).

Nothing here knows how ours are read. Each writer takes a weight [outputs, inputs] and a random generator.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.unit.model.support import SEED

GROUP = 16


def _affine(weight: np.ndarray, group: int, bits: int, rng: np.random.Generator, *, symmetric: bool):
    """Unsigned values [O, I], zeros and float16 scales [O, G], and the weight they mean."""
    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, inputs // group, group)
    high = 2**bits - 1
    scales = (np.abs(grouped).max(-1) * 2 / high + 1e-3).astype(np.float16)
    zeros = np.full(scales.shape, 2 ** (bits - 1)) if symmetric else rng.integers(0, high + 1, scales.shape)
    wide = scales.astype(np.float32)[..., None]
    values = np.clip(np.round(grouped / wide) + zeros[..., None], 0, high).astype(np.int64)
    means = (values - zeros[..., None]) * wide
    return values.reshape(weight.shape), zeros, scales, means.reshape(weight.shape).astype(np.float32)


def pack_words(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """int32 [n, ceil(m * bits / 32)]: fields from the lowest bits up; field i of a word is its value order[i]."""
    fields = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // fields)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for i in range(fields):
                column = word * fields + (i if order is None else order[i])
                if column < columns:
                    words[row, word] |= np.uint32(int(values[row, column]) << (bits * i))
    return words.view(np.int32)


def awq(weight, rng):
    values, zeros, scales, means = _affine(weight, GROUP, 4, rng, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": pack_words(values.T, 4, order), "qzeros": pack_words(zeros.T, 4, order), "scales": scales.T}
    return tensors, means


def gptq(weight, rng, *, bits: int = 4, offset: int = 1, reorder: bool = False):
    inputs = weight.shape[1]
    order = rng.permutation(inputs) if reorder else np.arange(inputs)
    values, zeros, scales, means = _affine(weight[:, order], GROUP, bits, rng, symmetric=False)
    group_of_input = np.empty(inputs, np.int32)
    group_of_input[order] = np.arange(inputs) // GROUP
    back = np.argsort(order)
    tensors = {
        "qweight": _pack_rows(values[:, back].T, bits),
        "qzeros": pack_words((zeros.T - offset) % 2**bits, bits),
        "scales": scales.T,
        "g_idx": group_of_input,
    }
    return tensors, means[:, back]


def _pack_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """Packed along the first axis."""
    return np.ascontiguousarray(pack_words(np.ascontiguousarray(values.T), bits).T)


def compressed_packed(weight, rng, *, bits: int = 4, group: int | None = GROUP, symmetric: bool = True):
    outputs, inputs = weight.shape
    values, zeros, scales, means = _affine(weight, group or inputs, bits, rng, symmetric=symmetric)
    tensors = {
        "weight_packed": pack_words(values, bits),
        "weight_scale": scales,
        "weight_shape": np.array([outputs, inputs], np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _pack_rows(zeros, bits)
    return tensors, means


def compressed_int8(weight, rng, *, symmetric: bool = True):
    values, zeros, scales, means = _affine(weight, weight.shape[1], 8, rng, symmetric=symmetric)
    tensors = {"weight": (values - 128).astype(np.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).astype(np.int8)
    return tensors, means


def e4m3_values() -> np.ndarray:
    """What each byte means: a sign, four bits of exponent (bias 7), three of mantissa; 0x7f and 0xff are no numbers."""
    found = np.empty(256, np.float32)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        found[byte] = -size if byte & 128 else size
    found[[0x7F, 0xFF]] = np.inf
    return found


def _nearest(weight: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.abs(weight[..., None] - table).argmin(-1)


def _fp8(weight: np.ndarray, scales: np.ndarray):
    codes = _nearest(weight / scales, e4m3_values()).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), e4m3_values()[codes] * scales


def fp8(weight, rng, *, name: str = "weight_scale", shared: str = "tensor", block: tuple[int, int] = (24, 20)):
    """shared: tensor (one number), channel ([O, 1]) or block."""
    if shared == "block":
        rows, columns = -(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1])
        scales = (0.01 + rng.random((rows, columns)) / 50).astype(np.float32)
        wide = np.empty(weight.shape, np.float32)
        for i in range(weight.shape[0]):
            for j in range(weight.shape[1]):
                wide[i, j] = scales[i // block[0], j // block[1]]
    else:
        scales = np.abs(weight).max(1, keepdims=True) / 448 if shared == "channel" else np.abs(weight).max() / 448
        scales = wide = np.asarray(scales, np.float32)
    stored, means = _fp8(weight, wide)
    return {"weight": stored, name: scales}, means


def nvfp4(weight, rng):
    outputs = len(weight)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([magnitudes, -magnitudes])
    whole = np.float32(448 * 6 / np.abs(weight).max())
    grouped = weight.reshape(outputs, -1, 16)
    codes = _nearest(np.abs(grouped).max(-1) / 6 * whole, e4m3_values()[:0x7F]).astype(np.uint8)
    scales = e4m3_values()[codes] / whole
    fields = _nearest(grouped / np.maximum(scales, 1e-9)[..., None], table)
    means = (table[fields] * scales[..., None]).reshape(weight.shape).astype(np.float32)
    fields = fields.reshape(weight.shape)
    tensors = {
        "weight_packed": (fields[:, 0::2] | fields[:, 1::2] << 4).astype(np.uint8),
        "weight_scale": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        "weight_global_scale": np.array([whole], np.float32),
    }
    return tensors, means


def write_quantised(source: Path, model, directory: Path, writer, config: dict, *, head: bool = False) -> None:
    """The model of `source` in `directory`, quantised; `model`, transformers' instance, gets the weights it means."""
    tensors = load_file(source / "model.safetensors")
    model.load_state_dict(tensors)
    rng = np.random.default_rng(SEED)
    for name, module in model.named_modules():
        is_head = module is model.get_output_embeddings()
        if not isinstance(module, torch.nn.Linear) or (is_head and not head):
            continue
        stored, means = writer(tensors.pop(f"{name}.weight").float().numpy(), rng)
        for suffix, value in stored.items():
            tensors[f"{name}.{suffix}"] = (
                value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
            )
        if config["quant_method"] not in ("awq", "gptq"):  # those know no scales of activations
            tensors[f"{name}.input_scale"] = torch.ones(1)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(means))
    save_file(tensors, directory / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))

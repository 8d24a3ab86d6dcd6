"""Quantised tensors against the gguf package over whole tensors and against formulas written out by hand."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from scheduler_svc.errors import StartupError
from scheduler_svc.models import gguf_tensors
from scheduler_svc.models.gguf_file import GgufFile
from scheduler_svc.models.gguf_tensors import LAYOUTS, TensorSpec, expand, halved_order
from tests.unit.models.gguf_builder import close

PLAIN = [Type.F32, Type.F16, Type.BF16]
QUANTISED = [
    kind for kind in Type if kind not in PLAIN and kind in gguf.quants._type_traits and GGML_QUANT_SIZES[kind][0] > 1
]
REQUIRED = {
    Type.Q8_0,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q2_K,
    Type.Q3_K,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
}


def q8_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    return [scale * value for value in struct.unpack("<32b", block[2:])]


def q4_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack("<e", block[:2])
    nibbles = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [scale * (nibble - 8) for nibble in nibbles]


def q4_1(block: bytes) -> list[float]:
    scale, minimum = struct.unpack("<ee", block[:4])
    nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [np.float32(scale) * np.float32(nibble) + np.float32(minimum) for nibble in nibbles]


def random_blocks(kind: Type, num_rows: int, blocks_per_row: int) -> np.ndarray:
    """Random bytes are valid blocks of every type, once the float16 scales among them are finite."""
    rng = np.random.default_rng(int(kind))
    raw = rng.integers(0, 256, (num_rows, blocks_per_row * GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    # Exponent bits all ones make infinities and NaNs; clearing 0x40 of each byte bounds every exponent.
    return raw & 0xBF


def write(path, tensors: dict[str, tuple[np.ndarray, Type]]):
    writer = gguf.GGUFWriter(path, "llama")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    close(writer)
    return path


def spec_of(file: GgufFile, name: str, architecture: str = "qwen2", heads: int = 2) -> TensorSpec:
    config = {"num_attention_heads": heads, "num_key_value_heads": heads}
    layout = LAYOUTS[architecture]
    return gguf_tensors._spec(file, file.tensors[name], gguf_tensors.hf_name(name, layout), layout, config)


def read(spec: TensorSpec) -> np.ndarray:
    content = b"".join(np.ascontiguousarray(chunk).tobytes() for chunk in spec.chunks())
    return np.frombuffer(content, np.float32).reshape(spec.shape)


def test_every_type_that_must_be_read_is_among_those_tested():
    assert set(QUANTISED) >= REQUIRED


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_each_type_equals_the_gguf_package(tmp_path, kind):
    blocks = random_blocks(kind, num_rows=6, blocks_per_row=2)
    path = write(tmp_path / "one.gguf", {"blk.0.ffn_up.weight": (blocks, kind)})
    with GgufFile(path) as file:
        spec = spec_of(file, "blk.0.ffn_up.weight")
        assert spec.dtype == "F32"
        assert spec.shape == (6, 2 * GGML_QUANT_SIZES[kind][0])
        np.testing.assert_array_equal(read(spec), gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize(("kind", "formula"), [(Type.Q8_0, q8_0), (Type.Q4_0, q4_0), (Type.Q4_1, q4_1)])
def test_simple_types_equal_their_formula(kind, formula):
    blocks = random_blocks(kind, num_rows=5, blocks_per_row=3)
    size = GGML_QUANT_SIZES[kind][1]
    expected = [formula(row[i : i + size].tobytes()) for row in blocks for i in range(0, len(row), size)]
    np.testing.assert_array_equal(expand(blocks, kind), np.array(expected, np.float32).reshape(5, 96))


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
def test_plain_types_keep_their_bytes(tmp_path, kind):
    values = np.random.default_rng(3).standard_normal((4, 8), np.float32)
    stored = gguf.quants.quantize(values, kind)
    path = write(tmp_path / "one.gguf", {"blk.0.ffn_up.weight": (stored, kind)})
    with GgufFile(path) as file:
        spec = spec_of(file, "blk.0.ffn_up.weight")
        assert spec.dtype == kind.name
        assert b"".join(chunk.tobytes() for chunk in spec.chunks()) == stored.tobytes()


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("kind", [Type.F32, Type.Q4_1], ids=lambda kind: kind.name)
def test_chunks_do_not_show(tmp_path, monkeypatch, chunk_rows, kind):
    """8 rows in chunks of 1..9 rows, with the rotary order undone across chunk borders."""
    monkeypatch.setattr(gguf_tensors, "CHUNK_BYTES", 4 * 64 * chunk_rows)
    blocks = random_blocks(Type.Q4_1, 8, 2)
    stored = blocks if kind is Type.Q4_1 else gguf.quants.dequantize(blocks, Type.Q4_1)
    path = write(tmp_path / "one.gguf", {"blk.0.attn_q.weight": (stored, kind)})
    with GgufFile(path) as file:
        spec = spec_of(file, "blk.0.attn_q.weight", "llama")
        assert len(list(spec.chunks())) == -(-8 // chunk_rows)
        # Two heads of four rows a0 b0 a1 b1 become a0 a1 b0 b1.
        expected = gguf.quants.dequantize(blocks, Type.Q4_1)[[0, 2, 1, 3, 4, 6, 5, 7]]
        np.testing.assert_array_equal(read(spec), expected)


def test_halved_order_undoes_the_converter():
    rows = np.arange(24)
    stored = rows.reshape(3, 2, 4).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(stored[halved_order(24, 3)], rows)


def test_a_type_nobody_can_expand_is_refused(tmp_path):
    path = write(tmp_path / "one.gguf", {"blk.0.ffn_up.weight": (np.zeros((2, 292), np.uint8), Type.Q8_K)})
    with GgufFile(path) as file, pytest.raises(StartupError, match=r"stored as Q8_K.*another quantisation"):
        spec_of(file, "blk.0.ffn_up.weight")

"""The container: what a good file holds, and one clear error for every way in which a file is not good."""

import struct
from contextlib import suppress

import gguf
import numpy as np
import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.models.gguf_file import GgufFile
from tests.unit.models.gguf_builder import close

HEADER = struct.Struct("<4sIQQ")


def good_file(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 4_000_000_000)
    writer.add_float32("a.fraction", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "grüße")
    writer.add_array("a.words", ["one", "", "zwei"])
    writer.add_array("a.numbers", [1, 2, -3])
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    close(writer)
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def info(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def craft(path, *, pairs: bytes = b"", num_pairs: int = 0, infos=(), data: bytes = b"", version: int = 3):
    header = HEADER.pack(b"GGUF", version, len(infos), num_pairs) + pairs + b"".join(infos)
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def test_reads_metadata_and_tensors(tmp_path):
    with GgufFile(good_file(tmp_path / "good.gguf")) as file:
        assert file.metadata == {
            "general.architecture": "llama",
            "a.number": 4_000_000_000,
            "a.fraction": 0.5,
            "a.flag": True,
            "a.text": "grüße",
            "a.words": ["one", "", "zwei"],
            "a.numbers": [1, 2, -3],
        }
        assert file.tensors["first"].shape == (3, 4)
        first = file.rows(file.tensors["first"]).view(np.float32)
        np.testing.assert_array_equal(first, np.arange(12, dtype=np.float32).reshape(3, 4))
        assert file.rows(file.tensors["second"]).view(np.float16).tolist() == [[0, 1, 2, 3, 4]]


def test_every_truncation_is_a_startup_error(tmp_path):
    whole = good_file(tmp_path / "good.gguf").read_bytes()
    with GgufFile(tmp_path / "good.gguf") as file:
        last = max(tensor.start + tensor.num_bytes for tensor in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in range(last):
        cut.write_bytes(whole[:length])
        with pytest.raises(StartupError, match=r"cut off|not a GGUF|is empty"):
            GgufFile(cut)
    cut.write_bytes(whole[:last])
    with GgufFile(cut) as file:
        assert len(file.tensors) == 2


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_escape_as_another_error(tmp_path, seed):
    whole = good_file(tmp_path / "good.gguf").read_bytes()
    rng = np.random.default_rng(seed)
    bad = tmp_path / "bad.gguf"
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, len(data) - 64, 3):
            data[position] = rng.integers(0, 256)
        bad.write_bytes(data)
        with suppress(StartupError), GgufFile(bad) as file:
            for tensor in file.tensors.values():
                file.rows(tensor)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + b"\0" * 60, "not a GGUF file"),
        (HEADER.pack(b"GGUF", 1, 0, 0), "GGUF version 1"),
        (HEADER.pack(b"GGUF", 0x03000000, 0, 0), "GGUF version"),
        (HEADER.pack(b"GGUF", 3, 1 << 60, 0), "cut off"),
        (HEADER.pack(b"GGUF", 3, 0, 1 << 62), "cut off"),
        (b"", "is empty"),
    ],
)
def test_bad_headers(tmp_path, content, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<IIQ", 9, 8, 1 << 61), "cut off"),
        (struct.pack("<IIQ", 9, 4, 1 << 61), "cut off"),
        (struct.pack("<IIQ", 9, 9, 1) + b"\0" * 64, "array of arrays"),
        (struct.pack("<IQ", 8, 1 << 63), "cut off"),
    ],
)
def test_bad_metadata(tmp_path, value, message):
    path = craft(tmp_path / "bad.gguf", pairs=text("key") + value, num_pairs=1, data=b"\0" * 32)
    with pytest.raises(StartupError, match=message):
        GgufFile(path)


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([info("a", ())], "0 dimensions"),
        ([info("a", (1,) * 5)], "5 dimensions"),
        ([info("a", (0, 4))], "empty dimension"),
        ([info("a", (1 << 40, 1 << 40))], "cut off"),
        ([info("a", (4,), offset=1 << 62)], "cut off"),
        ([info("a", (4,), offset=3)], "not aligned"),
        ([info("a", (4,), kind=250)], "type 250"),
        ([info("a", (33,), kind=8)], "no multiple of 32"),
        ([info("a", (4,)), info("a", (4,))], "occurs twice"),
    ],
)
def test_bad_tensor_tables(tmp_path, infos, message):
    path = craft(tmp_path / "bad.gguf", infos=infos, data=b"\0" * 64)
    with pytest.raises(StartupError, match=message):
        GgufFile(path)


def test_the_last_byte_of_a_tensor_counts(tmp_path):
    for num_bytes, good in ((15, False), (16, True), (17, True)):
        path = craft(tmp_path / "edge.gguf", infos=[info("a", (4,))], data=b"\0" * num_bytes)
        if good:
            GgufFile(path)
        else:
            with pytest.raises(StartupError, match="cut off"):
                GgufFile(path)


def test_a_missing_file_and_a_directory(tmp_path):
    with pytest.raises(StartupError, match="No such file"):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(StartupError, match="cannot read"):
        GgufFile(tmp_path)

"""The native engine: the same bits however the work is cut, close to float32 in every type, careful with input."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.backends import cpu
from executor_svc.backends.select import make_backend
from executor_svc.config import BackendChoice, Dtype, ExecutorConfig, SizeSettings
from executor_svc.model import native
from executor_svc.model.config import ModelConfig
from executor_svc.model.load import load_model
from executor_svc.model.native_decoder import NativeDecoder
from executor_svc.startup import Startup
from tests.unit.model.support import Driver, Row, check_against, make_model, prompt

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
SHAPE = {"hidden_size": 96, "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}
DTYPES = ("float32", "bfloat16", "int8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model whose sizes are no multiples of the engine's: directory, config, transformers' instance."""
    directory = tmp_path_factory.mktemp("tiny")
    reference = make_model(directory, "llama", **SHAPE, attention_bias=True)
    return directory, ModelConfig.from_directory(directory), reference


def load(tiny, dtype: str, **options) -> NativeDecoder:
    decoder = load_model(tiny[0], tiny[1], dtype=dtype, num_threads=2, **options)
    assert isinstance(decoder, NativeDecoder), decoder.description
    return decoder


def logits_of(row: Row) -> torch.Tensor:
    return torch.stack([row.logits[position] for position in sorted(row.logits)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_chunks_blocks_or_neighbours(tiny, dtype):
    decoder, config = load(tiny, dtype), tiny[1]
    alone = Driver(decoder, config).run(Row(prompt(150)), chunk=1000, num_outputs=20)
    for block_size, chunk in ((16, 1), (16, 7), (32, 33), (48, 128), (8, 50), (5, 1000)):
        driver = Driver(decoder, config, block_size=block_size)
        other = driver.run(Row(prompt(150)), chunk=chunk, num_outputs=20)
        assert torch.equal(logits_of(other), logits_of(alone)), f"block size {block_size}, chunk {chunk}"
    assert torch.equal(logits_of(in_a_crowd(decoder, config, Row(prompt(150)), 20)), logits_of(alone))


def in_a_crowd(decoder: NativeDecoder, config: ModelConfig, row: Row, num_outputs: int) -> Row:
    """The row among rows of every length below 40: their prompts in one step, then one token a step."""
    driver, rows = Driver(decoder, config), [row, *(Row(prompt(n, seed=n)) for n in range(1, 40))]
    driver.step([(row, len(row.tokens)) for row in reversed(rows)])
    for _ in range(num_outputs - 1):
        driver.step([(row, 1) for row in rows])
    return row


def rows_with_a_prefix(driver: Driver, length: int, own: list[int]) -> list[Row]:
    """Rows that share the whole blocks of their first `length` tokens; each has `own[i]` tokens more."""
    first = Row(prompt(length))
    driver.step([(first, length)])
    whole = length // driver.kv.block_size
    rows = []
    for i, count in enumerate(own):
        row = Row([*prompt(length), *prompt(count, seed=100 + i)])
        row.blocks = first.blocks[:whole]
        row.computed = whole * driver.kv.block_size
        rows.append(row)
    return rows


def check_shared_prefix(
    decoder: NativeDecoder, config: ModelConfig, length: int, block_size: int, own: list[int]
) -> None:
    """Rows that begin alike and decode side by side, strangers between them: each as if it were alone."""
    driver = Driver(decoder, config, block_size=block_size, num_blocks=4096 // block_size)
    rows = rows_with_a_prefix(driver, length, own)
    rows[5:5] = [Row(prompt(140, seed=7)), Row(prompt(3, seed=8))]
    expected = [
        Driver(decoder, config, block_size=block_size).run(Row(list(row.tokens)), chunk=1000, num_outputs=4)
        for row in rows
    ]
    for row in rows:
        driver.step([(row, len(row.tokens) - row.computed)])
    for _ in range(3):
        driver.step([(row, 1) for row in rows])
    for i, (row, undisturbed) in enumerate(zip(rows, expected, strict=True)):
        assert torch.equal(logits_of(row), logits_of(undisturbed)), f"row {i}"


# Around whole tiles of 128 positions; more rows than are attended at once; what is their own ends around an edge.
@pytest.mark.parametrize(
    ("length", "block_size"), [(127, 16), (128, 16), (129, 16), (256, 32), (300, 16), (272, 5), (336, 48)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_prefix_changes_no_bit(tiny, dtype, length, block_size):
    own = [1, 2, 15, 16, 17, 100, 128, 130, 3, 3, 3, 3, 3, 3]
    if dtype != "bfloat16":
        own = own[:8]
    check_shared_prefix(load(tiny, dtype), tiny[1], length, block_size, own)


@pytest.mark.parametrize("window", [1, 40, 128, 200])
def test_a_window_over_a_shared_prefix_changes_no_bit(tmp_path, window):
    make_model(tmp_path, "mistral", sliding_window=window)
    config = ModelConfig.from_directory(tmp_path)
    assert all(layer.window == window for layer in config.layers)
    decoder = load_model(tmp_path, config, dtype="bfloat16", num_threads=2)
    check_shared_prefix(decoder, config, 260, 16, [1, 2, 17, 100, 130, 3, 3, 3, 3, 3])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 5e-2)])
def test_close_to_float32(tiny, dtype, tolerance):
    directory, config, _ = tiny
    expected = Driver(load_model(directory, config, dtype="float32", use_native=False), config)
    expected = expected.run(Row(prompt(60)), chunk=1000, num_outputs=1)
    found = Driver(load(tiny, dtype), config).run(Row(prompt(60)), chunk=1000, num_outputs=1)
    error = (logits_of(found) - logits_of(expected)).norm() / logits_of(expected).norm()
    assert error < tolerance


@pytest.mark.parametrize("head_dim", [16, 48, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 8])
def test_head_sizes(tmp_path, head_dim, block_size):
    reference = make_model(tmp_path, "llama", head_dim=head_dim, num_hidden_layers=1, sliding_window=None)
    config = ModelConfig.from_directory(tmp_path)
    decoder = load_model(tmp_path, config, dtype="float32", num_threads=1)
    check_against(
        reference, Driver(decoder, config, block_size=block_size).run(Row(prompt(135)), chunk=70, num_outputs=4)
    )
    half = load_model(tmp_path, config, dtype="bfloat16", num_threads=1)
    alone = Driver(half, config, block_size=block_size).run(Row(prompt(135)), chunk=1000, num_outputs=4)
    again = Driver(half, config, block_size=block_size).run(Row(prompt(135)), chunk=9, num_outputs=4)
    assert torch.equal(logits_of(alone), logits_of(again))


def flags_for(processor: str) -> tuple[str, ...]:
    common = tuple(flag for flag in native.FLAGS if flag != "-march=native")
    here = Path(__file__).parent
    base = (*common, "-march=haswell", "-Wno-psabi", "-O1", "-include")
    return {
        "plain": common,
        "AVX2": (*common, "-march=haswell"),
        "pairs on AVX2": (*common, "-march=haswell", "-DPAIRED=1"),
        "AVX-512": (*base, str(here / "emulated_avx512.h")),
        "AVX-512 BF16": ("-DEMULATE_BF16=1", *base, str(here / "emulated_avx512.h")),
        "AMX": (*base, str(here / "emulated_amx.h")),
    }[processor]


@pytest.mark.parametrize("processor", ["plain", "AVX2", "pairs on AVX2", "AVX-512", "AVX-512 BF16", "AMX"])
def test_other_processors(tiny, monkeypatch, tmp_path, processor):
    """Without vector instructions, with AVX2 alone, and with what AVX-512 and AMX add, their instructions emulated."""
    if processor != "plain" and "avx2" not in native.cpu_flags():
        pytest.skip("it cannot run here")
    monkeypatch.setattr(native, "FLAGS", flags_for(processor))
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2), ("int8", 5e-2)):
        decoder, config = load(tiny, dtype, cache_dir=tmp_path), tiny[1]
        assert decoder.engine.pairs == (processor in ("pairs on AVX2", "AVX-512 BF16", "AMX"))
        assert (decoder.engine.name == "AMX") == (processor == "AMX")
        plain = Driver(decoder, config).run(Row(prompt(60)), chunk=1000, num_outputs=5)
        for block_size, chunk in ((16, 7), (32, 33), (48, 1000), (8, 50)):
            chunked = Driver(decoder, config, block_size=block_size).run(Row(prompt(60)), chunk=chunk, num_outputs=5)
            assert torch.equal(logits_of(plain), logits_of(chunked)), f"block size {block_size}, chunk {chunk}"
        assert torch.equal(logits_of(in_a_crowd(decoder, config, Row(prompt(60)), 5)), logits_of(plain))
        check_shared_prefix(decoder, config, 130, 16, [1, 2, 17, 3, 3, 3, 3])
        reference = tiny[2](torch.tensor([plain.tokens])).logits[0, 59].detach()
        assert (plain.logits[59] - reference).norm() / reference.norm() < tolerance


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", -1),
        ("token_ids", 97),
        ("positions", -1),
        ("positions", 512),
        ("slot_mapping", -1),
        ("slot_mapping", 256 * 16),
        ("cu_seqlens", 1),
        ("seq_lens", 2),
        ("seq_lens", 513),
        ("block_tables", -1),
        ("block_tables", 256),
        ("logits_index", -1),
        ("logits_index", 3),
    ],
)
def test_no_number_of_a_batch_becomes_an_unchecked_index(tiny, name, value):
    driver = Driver(load(tiny, "float32"), tiny[1])
    row = Row(prompt(3), blocks=[7])
    batch = driver.batch([(row, 3)])
    array = getattr(batch, name).copy()
    array.flat[0] = value
    with pytest.raises(AssertionError, match=name):
        driver.decoder.forward(replace(batch, **{name: array}), driver.kv)


def test_a_step_that_samples_nothing(tiny):
    driver = Driver(load(tiny, "bfloat16"), tiny[1])
    row = Row(prompt(30))
    driver.step([(row, 10)])
    assert row.logits == {}
    assert row.computed == 10


def test_logits_of_several_positions_of_one_row(tiny):
    driver = Driver(load(tiny, "float32"), tiny[1])
    row = Row(prompt(20), blocks=[3, 4])
    batch = replace(driver.batch([(row, 20)]), logits_index=np.array([3, 19], np.int32))
    found = torch.tensor(driver.decoder.forward(batch, driver.kv))
    expected = tiny[2](torch.tensor([row.tokens])).logits[0, [3, 19]].detach()
    assert (found - expected).norm() / expected.norm() < 1e-5


def test_without_a_compiler_torch_takes_over_and_says_so(tiny, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    decoder = load_model(tiny[0], tiny[1], dtype="float32")
    assert "no C compiler found" in decoder.description
    check_against(tiny[2], Driver(decoder, tiny[1]).run(Row(prompt(9)), chunk=4, num_outputs=4))


@pytest.mark.parametrize("fast_bf16", [False, True])
@pytest.mark.parametrize("broken", ["no compiler", "a compiler that fails"])
def test_int8_without_the_engine_is_called_what_it_is(tiny, monkeypatch, tmp_path, fast_bf16, broken):
    if broken == "no compiler":
        monkeypatch.setattr(native.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(native, "FLAGS", ("-no-such-flag",))
    monkeypatch.setattr(native, "has_fast_bf16", lambda: fast_bf16)
    monkeypatch.setattr(cpu, "cache_directory", lambda: tmp_path)
    said: list[str] = []
    monkeypatch.setattr(Startup, "note", lambda self, line: said.append(line))
    sizes = SizeSettings(num_blocks=8, block_size=4)
    backend = make_backend(ExecutorConfig(tiny[0], BackendChoice.CPU, Dtype.INT8, sizes=sizes, threads=1), Startup())
    kind = "bfloat16" if fast_bf16 else "float32"
    assert backend.identity.dtype == backend.identity.kv_dtype == kind
    assert backend._decoder.dtype == getattr(torch, kind)
    (instead,) = [line for line in said if "needs the native engine" in line]
    assert instead.startswith("int8 needs the native engine (")
    assert instead.endswith(f"LlamaForCausalLM is computed in {kind}")
    assert any(f" as {kind}; " in line for line in said)
    assert not any("int8" in line for line in said if line != instead)


def test_a_failing_compiler_is_reported(tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FLAGS", ("-no-such-flag",))
    decoder = load_model(tiny[0], tiny[1], dtype="float32", cache_dir=tmp_path)
    assert "no native engine" in decoder.description
    assert "failed" in decoder.description
    assert list(tmp_path.iterdir()) == []


def test_the_engine_is_compiled_once(tiny, monkeypatch, tmp_path):
    load(tiny, "float32", cache_dir=tmp_path)
    (library,) = tmp_path.iterdir()

    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", refuse)
    assert "native engine" in load(tiny, "bfloat16", cache_dir=tmp_path).description
    assert list(tmp_path.iterdir()) == [library]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_file_stays_in_memory(tiny, dtype):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not list mappings")
    decoder = load(tiny, dtype)
    assert str(tiny[0]) not in maps.read_text()
    assert decoder.engine.name


@pytest.mark.parametrize(
    ("flags", "compiler", "expected"),
    [
        ({"avx2", "fma"}, "/usr/bin/cc", True),
        ({"avx2", "fma"}, None, False),
        ({"avx512_bf16"}, None, True),
        ({"sse2"}, "/usr/bin/cc", False),
    ],
)
def test_bfloat16_is_chosen_where_it_is_fast(monkeypatch, flags, compiler, expected):
    monkeypatch.setattr(native, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(native.shutil, "which", lambda name: compiler)
    assert native.prefers_bf16() == expected

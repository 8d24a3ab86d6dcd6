"""The CUDA backend's logic on CPU tensors, kernels interpreted: the same plans, the same tokens as the CPU backend."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.backends import cuda, cuda_warm_up
from executor_svc.backends.cuda import CudaBackend
from executor_svc.backends.cuda_decoder import TritonDecoder
from executor_svc.backends.cuda_memory import make_kv
from executor_svc.backends.cuda_step import StepTensors, TableMirror, arrange
from executor_svc.backends.cuda_warm_up import warm_up_batches, widest_batch
from executor_svc.backends.int8_linear import Int8Linear
from executor_svc.batch import ForwardBatch, build_batch
from executor_svc.config import Dtype, KVDtype
from executor_svc.errors import NotFinite
from executor_svc.kv_cache import KVPool
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.layers import PlainLinear
from executor_svc.model.torch_decoder import TorchDecoder
from executor_svc.model.weights import WeightSource
from executor_svc.rows import NEWEST, NO_NUMBER, RowTable
from executor_svc.sampler import Sampler
from kernels import attention_decode, attention_shared, configs, logits, rope_cache, sample
from protos.stepwire.wire.v1 import step_pb2
from tests.kernels.interpreted.models import make_checkpoint
from tests.unit.model.support import make_model

# Shorter than the engine's, so that contexts of several splits are few tokens: the interpreter's cost is per token.
SPLIT = TILE = 16
GEOMETRY = step_pb2.Geometry(
    num_blocks=64, block_size=16, max_num_seqs=6, max_model_len=200, max_num_batched_tokens=200, vocab_size=97
)


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "SPLIT", SPLIT)
    monkeypatch.setattr(attention_shared, "SPLIT", SPLIT)
    monkeypatch.setattr(cuda_warm_up, "SPLIT", SPLIT)
    monkeypatch.setattr(cuda, "SPLIT", SPLIT)
    # One program a token: programs of fewer heads than there are have their own tests.
    monkeypatch.setattr(rope_cache, "HEADS", 8)
    # The vocabulary is one block of this.
    monkeypatch.setattr(sample, "BLOCK", 128)
    monkeypatch.setattr(logits, "BLOCK", 128)
    for kernel in ("decode", "shared"):
        config = configs.attention_config(kernel, 16, torch.float32)
        monkeypatch.setitem(configs._INTERPRETED, kernel, replace(config, tile=TILE))


def ints(values: object) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def sampling(**values: object) -> step_pb2.Sampling:
    return step_pb2.Sampling(**{"temperature": 0, "top_p": 1, "repetition_penalty": 1, **values})


def admit(row: int, num_tokens: int, blocks: range, how: step_pb2.Sampling) -> step_pb2.Admit:
    tokens = np.random.default_rng(row).integers(0, 97, num_tokens)
    return step_pb2.Admit(
        row=row, token_ids=ints(tokens), num_prompt_tokens=num_tokens, block_ids=ints(blocks), sampling=how
    )


def adjusted() -> step_pb2.Sampling:
    return sampling(
        temperature=0.9,
        seed=2**63 + 5,
        choice=1,
        top_k=40,
        top_p=0.95,
        min_p=0.001,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        min_tokens=3,
        stop_token_ids=ints([4, 5]),
        bias_token_ids=ints([4, 9]),
        bias_values=np.array([30.0, -2.0], "<f4").tobytes(),
        logprobs=3,
    )


def plans() -> list[step_pb2.StepPlan]:
    """Prefill; a chunk beside decodes; decodes over several splits; a copy of a block; a release and a reuse."""
    return [
        step_pb2.StepPlan(
            admit=[admit(0, 5, range(0, 2), sampling()), admit(2, SPLIT + 3, range(2, 8), adjusted())],
            prefill=ints([(0, 5), (2, SPLIT)]),
        ),
        step_pb2.StepPlan(
            admit=[admit(1, 9, range(20, 23), sampling(temperature=1, seed=7))], prefill=ints([(1, 8), (2, 3)])
        ),
        step_pb2.StepPlan(),
        step_pb2.StepPlan(copy=ints([(1, 40)]), release=ints([0])),
        step_pb2.StepPlan(admit=[admit(0, 3, range(0, 1), adjusted())], prefill=ints([(0, 3)])),
        step_pb2.StepPlan(),
    ]


def make_backend(
    directory: Path,
    kv_dtype: torch.dtype = torch.float32,
    *,
    geometry: step_pb2.Geometry = GEOMETRY,
    linear: type[PlainLinear] | type[Int8Linear] = PlainLinear,
) -> CudaBackend:
    model = ModelConfig.from_directory(directory)
    source = WeightSource(Checkpoint(directory), model)
    where = torch.device("cpu")
    decoder = TritonDecoder(source, dtype=torch.float32, device=where, linear=linear)
    kv = make_kv(model, geometry, kv_dtype, where)
    return CudaBackend(decoder, kv, geometry, step_pb2.ModelIdentity(), "cpu")


class Oracle:
    """The CPU backend without its options: torch decoder, numpy sampler."""

    def __init__(self, directory: Path):
        model = ModelConfig.from_directory(directory)
        self.decoder = TorchDecoder(WeightSource(Checkpoint(directory), model))
        self.pool = KVPool(model, GEOMETRY.num_blocks, GEOMETRY.block_size, "float32")
        self.sampler = Sampler(GEOMETRY.vocab_size)

    def run(self, batch: ForwardBatch):
        return self.sampler.sample(self.decoder.forward(batch, self.pool).numpy(), batch.sampling)


# Gemma 2 has a layer with a window, shorter than the longest context, and one without.
FAST = [("qwen3", {"num_hidden_layers": 1}), ("gemma2", {"sliding_window": 12})]


@pytest.mark.parametrize(("family", "overrides"), FAST)
def test_the_same_plans_draw_the_same_tokens(family: str, overrides: dict, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **overrides)
    check_same_tokens(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "phi3", "smollm3"])
def test_other_families_draw_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    make_model(tmp_path, model_type, num_hidden_layers=2)
    check_same_tokens(tmp_path)


def check_same_tokens(tmp_path: Path) -> None:
    backend, oracle, rows = make_backend(tmp_path), Oracle(tmp_path), RowTable(GEOMETRY)
    for plan in plans():
        work = rows.apply(plan)
        if work.copy.size:
            backend.copy_blocks(work.copy)
        batch = build_batch(rows, work)
        expected = oracle.run(batch)
        output = backend.run(batch)
        assert output.token_ids.tolist() == expected.token_ids.tolist()
        for got, want in zip(output.logprobs, expected.logprobs, strict=True):
            assert (got.row, got.rank, got.top_token_ids) == (want.row, want.rank, want.top_token_ids)
            assert got.logprob == pytest.approx(want.logprob, abs=1e-3)
        rows.append(work, output.token_ids)


def test_linear_layers_in_bytes_give_nearly_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, oracle, rows = make_backend(tmp_path, linear=Int8Linear), Oracle(tmp_path), RowTable(GEOMETRY)
    plan = step_pb2.StepPlan(admit=[admit(2, SPLIT + 3, range(2, 8), adjusted())], prefill=ints([(2, SPLIT + 3)]))
    batch = build_batch(rows, rows.apply(plan))
    expected, output = oracle.run(batch), backend.run(batch)
    want, got = (
        dict(
            zip(np.frombuffer(told.top_token_ids, "<i4").tolist(), np.frombuffer(told.top_logprobs, "<f4"), strict=True)
        )
        for told in (expected.logprobs[0], output.logprobs[0])
    )
    common = want.keys() & got.keys()
    assert len(common) > len(want) // 2
    assert max(abs(want[token] - got[token]) for token in common) < 0.05
    assert cuda.resolve_types(Dtype.INT8, KVDtype.AUTO, (9, 0)) == (torch.bfloat16, torch.bfloat16)


def test_a_step_can_be_launched_before_the_last_one_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    first = step_pb2.StepPlan(admit=[admit(3, 5, range(0, 2), sampling())], prefill=ints([(3, 5)]))
    drawn = []
    for is_known in (True, False):
        backend, rows = make_backend(tmp_path), RowTable(GEOMETRY)
        for plan in (first, step_pb2.StepPlan(), step_pb2.StepPlan()):
            work = rows.apply(plan)
            batch = build_batch(rows, work)
            if not is_known and batch.num_tokens == 1:
                batch.token_ids[:] = NEWEST
            output = backend.launch(batch).wait()
            rows.append(work, output.token_ids)
            drawn.append(output.token_ids.tolist())
    assert drawn[:3] == drawn[3:]


def test_a_shared_prefix_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MIN_ROWS": 3, "MIN_TOKENS": SPLIT}.items():
        monkeypatch.setattr(attention_shared, name, value)
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, oracle, rows = make_backend(tmp_path), Oracle(tmp_path), RowTable(GEOMETRY)
    plan = step_pb2.StepPlan(admit=[admit(0, SPLIT + 7, range(0, 6), sampling())], prefill=ints([(0, SPLIT + 7)]))
    follow = step_pb2.StepPlan(prefill=ints([(row, 7) for row in (1, 2, 4)]))
    for row in (1, 2, 4):
        own = [*range(4), *range(6 * row, 6 * row + 2)]
        seated = admit(row, SPLIT + 7, range(0), sampling())
        seated.token_ids, seated.block_ids, seated.num_computed_tokens = plan.admit[0].token_ids, ints(own), SPLIT
        follow.admit.append(seated)
    found = []
    for step in (plan, follow, step_pb2.StepPlan(), step_pb2.StepPlan()):
        work = rows.apply(step)
        batch = build_batch(rows, work)
        found.append(backend._share(batch, worth=0))
        output = backend.run(batch)
        assert output.token_ids.tolist() == oracle.run(batch).token_ids.tolist()
        rows.append(work, output.token_ids)
    assert [share is not None for share in found] == [False, False, True, True]
    assert found[-1].num_shared_splits.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kv_dtype", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)])
def test_a_narrow_cache_stays_close(kv_dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, oracle, rows = make_backend(tmp_path, kv_dtype), Oracle(tmp_path), RowTable(GEOMETRY)
    work = rows.apply(plans()[0])
    batch = build_batch(rows, work)
    backend._update_tables(batch)
    got, expected = backend._forward(batch), oracle.decoder.forward(batch, oracle.pool)
    assert float((got - expected).norm() / expected.norm()) < 0.1


def test_warm_up_runs_every_kind_of_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    kinds = {(np.diff(b.cu_seqlens).max() > 1, (b.seq_lens > SPLIT).any()) for b in warm_up_batches(GEOMETRY)}
    assert kinds == {(True, False), (False, False), (False, True), (True, True)}
    make_backend(tmp_path).warm_up()


def test_a_padded_step_is_the_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, rows = make_backend(tmp_path), RowTable(GEOMETRY)
    for plan in plans()[:2]:
        work = rows.apply(plan)
        batch = build_batch(rows, work)
        rows.append(work, backend.run(batch).token_ids)
    batch = build_batch(rows, rows.apply(step_pb2.StepPlan()))
    backend._update_tables(batch)
    kept = [layer.cache.clone() for layer in backend._kv]
    computed = []
    for pad_to in (3, 4, 6):
        arrays = arrange(batch, block_q=32, pad_to=pad_to)
        step = StepTensors.of(torch.from_numpy(arrays.flat()), arrays.layout(), all_logits=True, max_splits=2)
        computed.append(backend._compute(step)[:3])
    for other in computed[1:]:
        torch.testing.assert_close(other, computed[0], rtol=1e-5, atol=1e-5)
    written = sum(int((a != b.cache).any(-1).sum()) for a, b in zip(kept, backend._kv, strict=True))
    assert written == 3 * 2 * 2  # rows, sides, heads: padding stores nothing


def test_a_step_that_draws_nothing_computes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, oracle, rows = make_backend(tmp_path), Oracle(tmp_path), RowTable(GEOMETRY)
    chunk = step_pb2.StepPlan(admit=[admit(0, 9, range(0, 1), sampling())], prefill=ints([(0, 8)]))
    head, widths = backend._decoder.head, []
    monkeypatch.setattr(backend._decoder, "head", lambda x: (widths.append(len(x)), head(x))[1])
    drawn = []
    for plan in (chunk, step_pb2.StepPlan()):
        work = rows.apply(plan)
        batch = build_batch(rows, work)
        expected = oracle.run(batch)
        drawn.append(backend.run(batch).token_ids.tolist())
        rows.append(work, expected.token_ids)
    assert widths == [1]
    assert drawn == [[], expected.token_ids.tolist()]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_model_that_computes_no_numbers_is_a_fault(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    backend, rows = make_backend(tmp_path), RowTable(GEOMETRY)
    backend._decoder.final_norm.fill_(float("nan"))
    work = rows.apply(step_pb2.StepPlan(admit=[admit(0, 5, range(0, 1), sampling())], prefill=ints([(0, 5)])))
    output = backend.run(build_batch(rows, work))
    assert output.token_ids.tolist() == [NO_NUMBER]
    with pytest.raises(NotFinite):
        rows.append(work, output.token_ids)


def test_the_widest_step_has_every_token_and_every_row(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    geometry = step_pb2.Geometry()
    geometry.CopyFrom(GEOMETRY)
    geometry.num_blocks, geometry.max_num_seqs, geometry.max_num_batched_tokens = 1, 3, 7
    batch = widest_batch(geometry)
    assert (batch.num_tokens, np.diff(batch.cu_seqlens).tolist(), len(batch.logits_index)) == (7, [3, 2, 2], 3)
    assert (batch.sampling.parameters["logprobs"] > 0).all()
    backend = make_backend(tmp_path, geometry=geometry)
    assert len(backend.run(batch).logprobs) == 3


def test_tables_upload_only_what_changed() -> None:
    mirror, rows = TableMirror(6, 13), RowTable(GEOMETRY)
    first = build_batch(rows, rows.apply(plans()[0]))
    changed = dict(mirror.update(first).tolist())
    assert {key: value for key, value in changed.items() if key // 13 == 2} == {2 * 13: 2}
    assert len(mirror.update(first)) == 0

"""Paged prefill and decode attention against float64, and their bitwise promises."""

import random

import pytest
import torch

from kernels.attention_decode import DecodeWorkspace, decode_attention, num_splits
from kernels.attention_prefill import plan_prefill, prefill_attention
from kernels.configs import AttentionConfig
from kernels.paged import SPLIT, AttentionSpec
from tests.kernels.interpreted.problems import (
    TOLERANCE,
    Problem,
    assert_close,
    assert_guards,
    guarded_like,
    make_problem,
)

# Large tiles: the interpreter's cost is per operation, hardly per element.
PREFILL = AttentionConfig(block_m=64, tile=64, num_warps=4, num_stages=2)
DECODE = AttentionConfig(block_m=16, tile=64, num_warps=4, num_stages=2)


def prefill(problem: Problem) -> torch.Tensor:
    whole, out = guarded_like(problem.q)
    group = problem.q.shape[1] // problem.kv.num_kv_heads
    work = plan_prefill(problem.cu_seqlens.numpy(), problem.seq_lens.numpy(), PREFILL.block_m // group)
    prefill_attention(
        problem.q,
        problem.kv,
        problem.spec,
        block_table=problem.block_table,
        cu_seqlens=problem.cu_seqlens,
        seq_lens=problem.seq_lens,
        work=torch.from_numpy(work),
        out=out,
        config=PREFILL,
    )
    assert_guards(whole)
    return out


def decode(problem: Problem, *, extra_splits: int = 0, padding: int = 0) -> torch.Tensor:
    """`padding` appends rows of length 0, `extra_splits` widens the grid; neither may change a bit."""
    q = torch.cat([problem.q, problem.q.new_full((padding, *problem.q.shape[1:]), float("nan"))])
    seq_lens = torch.cat([problem.seq_lens, torch.zeros(padding, dtype=torch.int32)])
    table = torch.cat(
        [problem.block_table, problem.block_table.new_full((padding, problem.block_table.shape[1]), 2**30)]
    )
    splits = num_splits(int(problem.seq_lens.max())) + extra_splits
    workspace = DecodeWorkspace((len(q), q.shape[1], splits, q.shape[2]), "cpu")
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    whole, out = guarded_like(q)
    decode_attention(
        q,
        problem.kv,
        problem.spec,
        block_table=table,
        seq_lens=seq_lens,
        max_splits=splits,
        workspace=workspace,
        out=out,
        config=DECODE,
    )
    assert_guards(whole)
    assert bool((out[len(problem.q) :] == 0).all())
    return out[: len(problem.q)]


FEATURES = {
    "plain": AttentionSpec(0.125),
    "window": AttentionSpec(0.125, window=37),
    "softcap": AttentionSpec(0.125, softcap=5.0),
    "both": AttentionSpec(0.125, window=70, softcap=20.0),
}
DTYPES = {
    "fp32": (torch.float32, None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "bf16_e4m3": (torch.bfloat16, torch.float8_e4m3fn),
    "bf16_e5m2": (torch.bfloat16, torch.float8_e5m2),
    "bf16_int8": (torch.bfloat16, torch.int8),
}
# (new, known): nothing before, a prefix before, one token, edges of blocks and of tiles.
RAGGED = [(1, 1), (15, 15), (16, 31), (17, 80), (1, 65), (64, 64), (3, 129)]
EDGES = [1, 15, 16, 17, 63, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_every_dtype(dtype: str) -> None:
    q_dtype, kv_dtype = DTYPES[dtype]
    problem = make_problem(1, RAGGED[2:5], dtype=q_dtype, kv_dtype=kv_dtype)
    assert_close(prefill(problem), problem.expected(), TOLERANCE[q_dtype])


@pytest.mark.parametrize("feature", FEATURES)
def test_prefill_every_feature(feature: str) -> None:
    problem = make_problem(2, RAGGED, spec=FEATURES[feature])
    assert_close(prefill(problem), problem.expected(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (8, 1), (7, 1)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_every_group(heads: tuple[int, int], block_size: int) -> None:
    problem = make_problem(3, [(5, 5), (20, 70)], heads=heads, block_size=block_size)
    assert_close(prefill(problem), problem.expected(), TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_every_dtype(dtype: str) -> None:
    q_dtype, kv_dtype = DTYPES[dtype]
    problem = make_problem(4, [(1, 17), (1, SPLIT + 9)], dtype=q_dtype, kv_dtype=kv_dtype)
    assert_close(decode(problem), problem.expected(), TOLERANCE[q_dtype])


@pytest.mark.parametrize("feature", FEATURES)
def test_decode_every_feature_at_every_edge(feature: str) -> None:
    problem = make_problem(5, [(1, known) for known in EDGES], spec=FEATURES[feature])
    assert_close(decode(problem), problem.expected(), TOLERANCE[torch.float16])


def test_decode_of_one_split_needs_no_combination() -> None:
    problem = make_problem(6, [(1, known) for known in EDGES[:-1]])
    direct, split = decode(problem), decode(problem, extra_splits=1)
    assert_close(direct, problem.expected(), TOLERANCE[torch.float16])
    assert torch.equal(direct, split)


@pytest.mark.parametrize(
    ("heads", "head_size"), [((4, 2), 64), ((8, 1), 64), ((20, 1), 64), ((8, 1), 96), ((20, 1), 96), ((4, 2), 128)]
)
def test_decode_every_group_and_head_size(heads: tuple[int, int], head_size: int) -> None:
    problem = make_problem(7, [(1, 40), (1, 300)], heads=heads, head_size=head_size)
    assert_close(decode(problem), problem.expected(), TOLERANCE[torch.float16])


def test_prefill_head_size_that_is_no_power_of_two() -> None:
    problem = make_problem(8, [(9, 40)], head_size=96)
    assert_close(prefill(problem), problem.expected(), TOLERANCE[torch.float16])


def one_row(problem: Problem, b: int) -> Problem:
    begin, end = int(problem.cu_seqlens[b]), int(problem.cu_seqlens[b + 1])
    return Problem(
        q=problem.q[begin:end],
        kv=problem.kv,
        spec=problem.spec,
        block_table=problem.block_table[b : b + 1].clone(),
        cu_seqlens=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=problem.seq_lens[b : b + 1].clone(),
    )


@pytest.mark.parametrize("window", [0, 100])
def test_decode_row_alone_is_the_row_in_a_batch(window: int) -> None:
    problem = make_problem(9, [(1, 300), (1, 5), (1, 700)], dtype=torch.bfloat16, spec=AttentionSpec(0.1, window))
    together = decode(problem)
    assert torch.equal(together, decode(problem, extra_splits=3, padding=5))
    for b in range(3):
        assert torch.equal(together[b : b + 1], decode(one_row(problem, b)))


def test_prefill_row_alone_is_the_row_in_a_batch() -> None:
    problem = make_problem(10, [(30, 90), (1, 5), (70, 70)], dtype=torch.bfloat16)
    together = prefill(problem)
    for b in range(3):
        begin, end = problem.cu_seqlens[b], problem.cu_seqlens[b + 1]
        assert torch.equal(together[begin:end], prefill(one_row(problem, b)))


@pytest.mark.parametrize("window", [0, 33])
def test_chunked_prefill_is_whole_prefill_bit_for_bit(window: int) -> None:
    problem = make_problem(11, [(100, 100)], dtype=torch.bfloat16, spec=AttentionSpec(0.1, window))
    chunks = []
    for begin, end in [(0, 13), (13, 80), (80, 81), (81, 100)]:
        chunk = one_row(problem, 0)
        chunk.q = problem.q[begin:end]
        chunk.cu_seqlens = torch.tensor([0, end - begin], dtype=torch.int32)
        chunk.seq_lens = torch.tensor([end], dtype=torch.int32)
        chunks.append(prefill(chunk))
    assert torch.equal(torch.cat(chunks), prefill(problem))


def test_where_blocks_lie_does_not_matter() -> None:
    problem = make_problem(12, [(1, 200), (1, 77)])
    order = torch.randperm(problem.kv.cache.shape[0], generator=torch.Generator().manual_seed(0))
    moved = make_problem(12, [(1, 200), (1, 77)])
    moved.kv.cache[order] = problem.kv.cache
    owned = problem.block_table != 2**30
    moved.block_table[owned] = order[problem.block_table[owned].long()].int()
    assert torch.equal(decode(problem), decode(moved))


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    plain = make_problem(13, [(20, 90)])
    wide = make_problem(13, [(20, 90)], spec=AttentionSpec(plain.spec.scale, window=90))
    assert torch.equal(prefill(plain), prefill(wide))


def test_plan_prefill_covers_every_query_once_longest_first() -> None:
    problem = make_problem(14, [(1, 1), (130, 200), (0, 0), (43, 43)])
    work = plan_prefill(problem.cu_seqlens.numpy(), problem.seq_lens.numpy(), 42)
    assert sorted(map(tuple, work.tolist())) == [(0, 0), (1, 0), (1, 42), (1, 84), (1, 126), (3, 0), (3, 42)]
    assert work[0].tolist() == [1, 126]


@pytest.mark.parametrize("seed", range(3))
def test_random_mixed_batches(seed: int) -> None:
    check_random_batch(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_mixed_batches(seed: int) -> None:
    check_random_batch(seed)


def check_random_batch(seed: int) -> None:
    """A mixed batch through prefill, and its newest tokens through decode."""
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2])
    head_size = draw.choice([32, 64, 80, 128])
    q_dtype, kv_dtype = DTYPES[draw.choice(list(DTYPES))]
    spec = AttentionSpec(head_size**-0.5, window=draw.choice([0, 0, 1, 50]), softcap=draw.choice([0.0, 0.0, 30.0]))
    lens = []
    for _ in range(draw.randint(1, 4)):
        new = draw.choice([1, 1, draw.randint(1, 90)])
        lens.append((new, new + draw.choice([0, draw.randint(0, 330)])))
    options = {
        "heads": (kv_heads * draw.choice([1, 3, 4]), kv_heads),
        "head_size": head_size,
        "block_size": draw.choice([16, 32, 64]),
        "dtype": q_dtype,
        "kv_dtype": kv_dtype,
        "spec": spec,
    }
    problem = make_problem(seed, lens, **options)
    assert_close(prefill(problem), problem.expected(), TOLERANCE[q_dtype])
    newest = make_problem(seed, [(1, known) for _, known in lens], **options)
    assert_close(decode(newest), newest.expected(), TOLERANCE[q_dtype])

"""Decode over a shared prefix, and block copies."""

import numpy as np
import pytest
import torch

from kernels import attention_decode, attention_shared
from kernels.attention_decode import DecodeWorkspace, decode_attention, num_splits
from kernels.attention_shared import plan_shared, shared_prefix_attention
from kernels.blocks import copy_blocks
from kernels.paged import AttentionSpec
from tests.kernels.interpreted.problems import TOLERANCE, Problem, assert_close, make_problem, poisoned_kv

# Shorter than the engine's: fewer tiles for the same edges.
SPLIT = 128


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_decode, attention_shared):
        monkeypatch.setattr(module, "SPLIT", SPLIT)
    monkeypatch.setattr(attention_shared, "MIN_ROWS", 2)
    monkeypatch.setattr(attention_shared, "MIN_TOKENS", SPLIT)


def sharing_problem(lens: list[int], prefix: int, **options: object) -> Problem:
    """Sequences 1.. use the blocks of sequence 0 for their first `prefix` tokens."""
    problem = make_problem(3, [(1, known) for known in lens], **options)
    blocks = prefix // problem.kv.block_size
    problem.block_table[1:, :blocks] = problem.block_table[0, :blocks]
    return problem


def run(problem: Problem, *, share: bool) -> torch.Tensor:
    splits = num_splits(int(problem.seq_lens.max()))
    workspace = DecodeWorkspace((len(problem.q), problem.q.shape[1], splits, problem.q.shape[2]), "cpu")
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    counts = None
    if share:
        plan = plan_shared(problem.block_table.numpy(), problem.seq_lens.numpy(), problem.kv.block_size, 3)
        assert plan is not None
        counts = torch.from_numpy(plan.num_shared_splits)
        shared_prefix_attention(
            problem.q,
            problem.kv,
            problem.spec,
            block_table=problem.block_table,
            members=torch.from_numpy(plan.members),
            work=torch.from_numpy(plan.work),
            workspace=workspace,
        )
    out = torch.full_like(problem.q, float("nan"))
    return decode_attention(
        problem.q,
        problem.kv,
        problem.spec,
        block_table=problem.block_table,
        seq_lens=problem.seq_lens,
        max_splits=splits,
        workspace=workspace,
        out=out,
        num_shared_splits=counts,
    )


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize(("heads", "kv_dtype"), [((3, 1), None), ((4, 2), torch.int8)])
def test_sharing_changes_nothing(heads: tuple[int, int], kv_dtype: torch.dtype | None) -> None:
    options = {"heads": heads, "dtype": torch.bfloat16, "kv_dtype": kv_dtype}
    lens = [2 * SPLIT + more for more in (18, 1, 65, 2)]
    problem = sharing_problem(lens, 2 * SPLIT, **options)
    shared = run(problem, share=True)
    assert_close(shared, problem.expected(), TOLERANCE[torch.bfloat16])
    assert_close(shared, run(problem, share=False), TOLERANCE[torch.bfloat16])


@pytest.mark.usefixtures("small_groups")
def test_who_shares_what() -> None:
    per_split = SPLIT // 16
    tables = np.arange(6 * 64, dtype=np.int32).reshape(6, 64)
    tables[[1, 2], :per_split] = tables[0, :per_split]
    tables[1, per_split : 2 * per_split - 1] = tables[0, per_split : 2 * per_split - 1]
    tables[4, : 2 * per_split] = tables[3, : 2 * per_split]
    seq_lens = np.array([600, 600, SPLIT, 2 * SPLIT + 1, 2 * SPLIT + 1, 600])
    plan = plan_shared(tables, seq_lens, 16, 8)
    assert plan is not None
    # Row 2 ends with its first split, row 1 differs in the last block of the second, row 5 is alone.
    assert plan.num_shared_splits.tolist() == [1, 1, 0, 2, 2, 0]
    assert plan.members.tolist() == [0, 1, 3, 4]
    assert plan.work.tolist() == [[0, 0, 2], [0, 2, 2], [1, 2, 2]]


def test_little_sharing_is_left_alone() -> None:
    tables = np.zeros((7, 128), np.int32)
    assert plan_shared(tables, np.full(7, 2000), 16, 8) is None
    assert plan_shared(np.zeros((8, 128), np.int32), np.full(8, 1024), 16, 8) is None
    assert plan_shared(np.zeros((8, 128), np.int32), np.full(8, 1025), 16, 8) is not None


def test_layers_with_a_window_refuse_to_share() -> None:
    problem = make_problem(1, [(1, 20)], spec=AttentionSpec(1.0, window=8))
    workspace = DecodeWorkspace((1, 3, 1, 64), "cpu")
    empty = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="window"):
        shared_prefix_attention(
            problem.q,
            problem.kv,
            problem.spec,
            block_table=problem.block_table,
            members=empty,
            work=empty,
            workspace=workspace,
        )


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_copying_blocks(kv_dtype: torch.dtype) -> None:
    kv = poisoned_kv((6, 16, 3, 96), kv_dtype)
    for tensor in (kv.cache, kv.scale):
        if tensor is not None:
            tensor.copy_(torch.arange(tensor.numel()).remainder(100).view(tensor.shape))
    for block in range(6):
        kv.cache[block, 0, 0, 0, 0] = block
    before = kv.cache.clone()
    copy_blocks(kv, torch.tensor([[0, 5], [0, 2], [3, 1]], dtype=torch.int32))
    assert torch.equal(kv.cache, before[[0, 3, 0, 3, 4, 0]])
    if kv.scale is not None:
        assert torch.equal(kv.scale[[1, 2, 5]], kv.scale[[3, 0, 0]])

"""Argmax, penalties, masks, edits and the sampler against their specification."""

import pytest
import torch

from kernels import reference
from kernels.logits import IN_PROMPT, LogitRules, apply_rules, argmax_lse, count_drawn, count_tokens
from kernels.sample import BLOCK, CANDIDATES, sample

V = 1000


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw(logits: torch.Tensor, params: tuple[float, float, float, int], keys: list[tuple[int, int, int]]) -> list[int]:
    """Row i of `logits` with (seed, choice, position) = keys[i]; params = (temperature, top_p, min_p, top_k)."""
    batch = len(keys)
    seeds, choices, positions = (torch.tensor(column) for column in zip(*keys, strict=True))
    tokens = sample(
        logits.expand(batch, -1),
        params=torch.tensor(params[:3]).expand(batch, 3).contiguous(),
        top_k=torch.full((batch,), params[3], dtype=torch.int32),
        seeds=seeds.long(),
        choices=choices.int(),
        positions=positions.int(),
        scratch=torch.full((batch, CANDIDATES), float("nan")),
    )
    return tokens.tolist()


MIXES = {
    "plain": (1.0, 1.0, 0.0, 0),
    "cold": (0.3, 1.0, 0.0, 0),
    "top_k": (1.0, 1.0, 0.0, 7),
    "top_p": (1.3, 0.8, 0.0, 0),
    "min_p": (1.0, 1.0, 0.2, 0),
    "all": (0.9, 0.9, 0.02, 20),
    "top_k_of_everything": (1.0, 0.99, 0.0, V),
    "tiny_top_p": (1.0, 1e-6, 0.0, 0),
    "one": (1.0, 1.0, 0.0, 1),
}


@pytest.mark.parametrize("mix", MIXES)
def test_draws_are_those_of_the_specification(mix: str) -> None:
    """Same noise, same support: the same token, unless float32 rounding decides a near tie; none of these is one."""
    logits = 3 * rand(V)
    keys = [(2**63 - 5 - 977 * i, i, i) for i in range(3)]
    assert draw(logits, MIXES[mix], keys) == [reference.sample(logits, MIXES[mix], key) for key in keys]


def test_more_candidates_than_are_copied_aside_and_a_ragged_last_block() -> None:
    logits = 0.1 * rand(BLOCK + CANDIDATES + 37)
    for params, keys in (((1.0, 0.9, 0.0, 0), [(11, 0, 0)]), ((1.0, 0.95, 0.0, 5000), [(12, 0, 0)])):
        assert draw(logits, params, keys) == [reference.sample(logits, params, key) for key in keys]


def test_a_flat_distribution_and_ties_at_the_threshold() -> None:
    """All candidates tie with the k-th, so all are kept."""
    logits = torch.zeros(64)
    keys = [(i, 0, 0) for i in range(5)]
    drawn = draw(logits, (1.0, 1.0, 0.0, 3), keys)
    assert drawn == [reference.sample(logits, (1.0, 1.0, 0.0, 3), key) for key in keys]
    assert len(set(drawn)) > 3


def test_far_apart_logits_are_found_below_every_cut() -> None:
    logits = torch.full((V,), -1e4)
    logits[[3, 500]] = torch.tensor([1e4, 0.0])
    params = (1.0, 1.0, 0.0, 3)
    assert draw(logits, params, [(1, 0, 0)]) == [3]


def test_banned_tokens_are_never_drawn_even_when_top_k_asks_for_more() -> None:
    logits = torch.full((V,), float("-inf"))
    logits[[10, 20]] = 0.0
    drawn = draw(logits, (1.0, 1.0, 0.0, 50), [(i, 0, 0) for i in range(4)])
    assert set(drawn) == {10, 20}


def test_greedy_takes_the_lowest_of_equal_logits() -> None:
    logits = rand(V)
    logits[[77, 400]] = 9.0
    assert draw(logits, (0.0, 1.0, 0.0, 0), [(1, 0, 0)]) == [77]


def test_noise_depends_on_seed_choice_and_position_alone() -> None:
    logits = rand(V)
    keys = [(5, 0, 0), (5, 1, 0), (5, 0, 1), (6, 0, 0), (5 + 2**32, 0, 0)]
    together = draw(logits, MIXES["plain"], keys)
    assert together == [draw(logits, MIXES["plain"], [key])[0] for key in keys]
    assert len(set(together)) == len(keys)


def test_frequencies_follow_the_distribution() -> None:
    """Chi-square over 8 tokens, 2,000 draws, fixed seeds: the 99.9 % point of 7 degrees of freedom is 24.3."""
    logits = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, -1.0, 0.2, 0.7])
    drawn = [reference.sample(logits, MIXES["plain"], (42, 0, position)) for position in range(2000)]
    expected = 2000 * torch.softmax(logits, 0)
    observed = torch.bincount(torch.tensor(drawn), minlength=8)
    assert float(((observed - expected) ** 2 / expected).sum()) < 24.3
    assert drawn[:6] == draw(logits, MIXES["plain"], [(42, 0, position) for position in range(6)])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity - infinity is the point
def test_a_row_that_is_no_number_draws_no_token() -> None:
    logits = rand(V)
    logits[5] = float("nan")
    assert draw(logits, MIXES["plain"], [(1, 0, 0)]) == [-1]
    assert draw(torch.full((V,), float("-inf")), MIXES["all"], [(1, 0, 0)]) == [-1]
    logits[5] = float("inf")
    assert draw(logits, (0.0, 1.0, 0.0, 0), [(1, 0, 0)]) == [-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK + 1])
def test_argmax_and_log_sum_exp(dtype: torch.dtype, vocab: int) -> None:
    logits = (5 * rand(3, vocab)).to(dtype)
    logits[1, :] = float("-inf")
    logits[1, vocab - 1] = 2.0
    ids, largest, lse = argmax_lse(logits)
    assert torch.equal(ids.long(), logits.float().argmax(-1))
    assert torch.equal(largest, logits.float().amax(-1))
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits.double(), -1), rtol=1e-6, atol=1e-6)


def test_penalties_masks_and_edits() -> None:
    rules = LogitRules(num_rows=4, vocab=V, max_edits=200, device="cpu")
    prompt, output = [1, 2, 3, 3], [3, 7, 7, 7]
    rules.penalties[2] = torch.tensor([0.5, 0.25, 1.3, 0.0])
    rules.penalties[1, 3] = 1
    rules.allowed[1, 0] = (1 << 5) | (1 << 31) - (1 << 32)
    rules.allowed[1, 31] = 1 << 3
    count_tokens(rules.counts[2], torch.tensor(prompt, dtype=torch.int32), in_prompt=True)
    count_tokens(rules.counts[2], torch.tensor(output[:-1], dtype=torch.int32), in_prompt=False)
    count_drawn(rules.counts, torch.tensor([2, -1], dtype=torch.int32), torch.tensor([7, 9], dtype=torch.int32))
    assert rules.counts[2, [1, 2, 3, 7, 9]].tolist() == [IN_PROMPT, IN_PROMPT, 2 * IN_PROMPT + 1, 3, 0]
    rules.num_edits[3] = 150
    rules.edit_ids[3, :150] = torch.arange(150)
    rules.edit_values[3, :150] = 2.5
    rules.edit_until[3, :150] = 2**31 - 1
    # Ids 4 and 140 are banned as well, until two tokens exist.
    rules.num_edits[3] += 2
    rules.edit_ids[3, 150:152] = torch.tensor([4, 140])
    rules.edit_values[3, 150:152] = float("-inf")
    rules.edit_until[3, 150:152] = 2

    raw = rand(4, V)
    rows = torch.tensor([2, -1, 3, 1], dtype=torch.int32)
    rules.num_outputs[3] = 1
    expected = raw.clone()
    reference.penalise(expected[0], prompt, output, (0.5, 0.25, 1.3))
    expected[2, :150] += 2.5
    expected[2, [4, 140]] = float("-inf")
    masked = torch.full((V,), float("-inf"))
    masked[[5, 31, 995]] = raw[3, [5, 31, 995]]
    expected[3] = masked
    torch.testing.assert_close(apply_rules(raw.clone(), rows, rules), expected)
    rules.num_outputs[3] = 2
    expected[2, [4, 140]] = raw[2, [4, 140]] + 2.5
    torch.testing.assert_close(apply_rules(raw.clone(), rows, rules), expected)

"""The sampler against oracles that share nothing with it: sorted lists, plain loops, float64."""

import math
import random

import numpy as np
import pytest

from executor_svc.errors import ComputeFault
from executor_svc.sampler import Sampler, keep
from executor_svc.sampling import SamplingTable
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import greedy, ints

V = 200


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def random_logits(seed: int, rows: int = 1, vocab: int = V, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def sample(logits: np.ndarray, asks: list[step_pb2.Sampling], prompts=None, outputs=None, rows=None):
    """One token per row of logits; row i has prompts[i] and outputs[i]."""
    count, vocab = logits.shape
    prompts = prompts or [[0]] * count
    outputs = outputs or [[]] * count
    rows = rows or list(range(count))
    table = SamplingTable(max(rows) + 1, vocab)
    tokens = np.zeros((max(rows) + 1, 400), np.int32)
    num_prompt, num_known = np.zeros((2, max(rows) + 1), np.int32)
    for row, ask, prompt, output in zip(rows, asks, prompts, outputs, strict=True):
        table.set(row, ask)
        tokens[row, : len(prompt) + len(output)] = [*prompt, *output]
        num_prompt[row], num_known[row] = len(prompt), len(prompt) + len(output)
    batch = table.select(np.array(rows, np.int32), tokens, num_prompt, num_known)
    return Sampler(vocab).sample(logits, batch)


def support(logits: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token -> probability, the textbook way: temperature, then min-p, then top-k, then top-p, each renormalised."""
    scaled = [float(x) / temperature for x in logits]
    largest = max(scaled)
    weights = {i: math.exp(x - largest) for i, x in enumerate(scaled)}
    weights = {i: w for i, w in weights.items() if min_p == 0 or w >= min_p}
    ranked = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        ranked = ranked[:top_k]
    total, mass, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in kept}


# ---- greedy -------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equals():
    logits = np.zeros((2, V), np.float32)
    logits[1, [50, 20, 199]] = 5
    assert sample(logits, [greedy(), greedy()]).token_ids.tolist() == [0, 20]


def test_greedy_does_not_see_seed_top_k_or_top_p():
    logits = random_logits(1, 4)
    asks = [greedy(), greedy(seed=9), greedy(top_k=1), greedy(top_p=0.01, min_p=1)]
    assert sample(logits, asks).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 57, V - 1])
def test_logits_that_are_not_finite_are_a_fault(bad, place):
    logits = random_logits(2, 3)
    logits[1, place] = bad
    with pytest.raises(ComputeFault, match="not finite"):
        sample(logits, [greedy()] * 3)


def test_minus_infinity_is_a_mask_unless_it_is_everything():
    logits = np.full((1, V), -np.inf, np.float32)
    with pytest.raises(ComputeFault):
        sample(logits, [greedy()])
    logits[0, 33] = -5
    for ask in (greedy(), greedy(temperature=1.0), greedy(temperature=1.0, top_p=0.5), greedy(temperature=2, top_k=7)):
        assert sample(logits, [ask]).token_ids.tolist() == [33]


# ---- filters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_the_support_is_the_textbooks(seed):
    rng = random.Random(seed)
    logits = random_logits(seed, spread=rng.choice([0.1, 1.0, 3.0]))[0]
    temperature = rng.choice([0.3, 1.0, 1.7])
    min_p = rng.choice([0.0, 0.0, 0.02, 0.3])
    top_k = rng.choice([0, 1, 2, 17, V - 1, V])
    top_p = rng.choice([1.0, 0.999, 0.9, 0.5, 1e-6])
    z = ((logits - logits.max()) / np.float32(temperature)).astype(np.float32)
    kept = keep(z, min_p, top_k, top_p)
    expected = sorted(support(logits, temperature, min_p, top_k, top_p))
    assert (list(range(V)) if kept is None else kept.tolist()) == expected, f"seed {seed}"


@pytest.mark.parametrize("top_k", [1, 3, 5, 6])
def test_top_k_keeps_exactly_k_of_equals(top_k):
    z = np.zeros(6, np.float32)
    z[2] = -1
    kept = keep(z, 0.0, top_k, 1.0)
    assert (kept.tolist() if kept is not None else list(range(6))) == sorted([0, 1, 3, 4, 5, 2][:top_k])


def test_top_p_keeps_the_lowest_of_equals():
    z = np.zeros(10, np.float32)
    assert keep(z, 0.0, 0, 0.25).tolist() == [0, 1, 2]
    assert keep(z, 0.0, 0, 0.3001).tolist() == [0, 1, 2, 3]
    assert keep(z, 0.0, 0, 1e-9).tolist() == [0]


def test_min_p_boundaries():
    z = np.array([0, -0.1, 0, -5], np.float32)
    assert keep(z, 0.0, 0, 1.0) is None
    assert keep(z, 1.0, 0, 1.0).tolist() == [0, 2]


@pytest.mark.parametrize("ask", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}])
def test_narrow_draws_are_greedy(ask):
    logits = random_logits(3, 16)
    asks = [greedy(**{"temperature": 1.0, "seed": i, **ask}) for i in range(16)]
    assert sample(logits, asks).token_ids.tolist() == logits.argmax(axis=1).tolist()


# ---- draws --------------------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """(statistic, a limit that a right sampler passes in all but one of 10^5 fixed seeds)."""
    expected = probabilities * counts.sum()
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(observed) - 1
    return float(((observed - wanted) ** 2 / wanted).sum()), freedom + 4.3 * math.sqrt(2 * freedom) + 12


@pytest.mark.parametrize(
    "ask",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.02, "top_k": 20, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("along", ["seed", "position"])
def test_draws_follow_the_distribution(ask, along):
    vocab, count = 50, 6000
    ask = {"temperature": 1.0, **ask}
    logits = random_logits(5, 1, vocab, 2.0)
    sampler, table = Sampler(vocab), SamplingTable(1, vocab)
    counts = np.zeros(vocab, np.int64)
    row, tokens, prompt = np.zeros(1, np.int32), np.zeros((1, 4), np.int32), np.zeros(1, np.int32)
    table.set(0, greedy(**ask, seed=77))
    for i in range(count):
        if along == "seed":
            table.set(0, greedy(**ask, seed=i))
        batch = table.select(row, tokens, prompt, np.array([i if along == "position" else 0], np.int32))
        counts[sampler.sample(logits, batch).token_ids[0]] += 1
    truth = support(logits[0], ask["temperature"], ask.get("min_p", 0.0), ask.get("top_k", 0), ask.get("top_p", 1.0))
    probabilities = np.array([truth.get(i, 0.0) for i in range(vocab)])
    assert counts[probabilities == 0].sum() == 0
    statistic, limit = chi_square(counts, probabilities)
    assert statistic < limit


def test_the_race_of_a_few_is_the_race_of_all():
    """The shortcut for unfiltered rows against every token's arrival time in float64."""
    from executor_svc.noise import NoiseSource, draw_key, exponential

    for seed in range(200):
        vocab = [3, 500, 49_152][seed % 3]
        logits = random_logits(seed, 1, vocab, [0.0, 0.01, 2.0, 8.0][seed % 4])
        temperature = [0.2, 1.0, 2.0][seed % 3]
        bits = NoiseSource(vocab).all_bits(draw_key(seed, 1, 3))
        z = (logits[0] - logits[0].max()) / np.float32(temperature)
        expected = int(np.argmin(np.log(exponential(bits)) - z.astype(np.float64)))
        ask = greedy(temperature=temperature, seed=seed, choice=1)
        got = sample(logits, [ask], prompts=[[1]], outputs=[[1, 2, 0]])
        assert got.token_ids.tolist() == [expected], f"seed {seed}"


def test_a_filter_that_leaves_the_winner_leaves_the_draw():
    logits = random_logits(8, 1, 5000)
    for seed in range(50):
        free = int(sample(logits, [greedy(temperature=1.0, seed=seed)]).token_ids[0])
        narrow = greedy(temperature=1.0, seed=seed, top_p=0.95)
        if free in support(logits[0], 1.0, 0, 0, 0.95):
            assert sample(logits, [narrow]).token_ids.tolist() == [free]


@pytest.mark.parametrize("seed", range(5))
def test_a_draw_depends_on_nothing_but_its_own_row(seed):
    rng = random.Random(seed)
    count = 12
    logits = random_logits(seed, count)
    asks = [
        greedy(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 10]),
            seed=rng.randrange(2**64),
            choice=rng.randrange(4),
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        for _ in range(count)
    ]
    outputs = [[rng.randrange(V) for _ in range(rng.randint(0, 9))] for _ in range(count)]
    together = sample(logits, asks, outputs=outputs).token_ids.tolist()
    alone = [int(sample(logits[i : i + 1], [asks[i]], outputs=[outputs[i]]).token_ids[0]) for i in range(count)]
    assert together == alone
    order = rng.sample(range(count), count)
    rows = sorted(rng.sample(range(40), count))
    shuffled = sample(logits[order], [asks[i] for i in order], outputs=[outputs[i] for i in order], rows=rows)
    assert shuffled.token_ids.tolist() == [together[i] for i in order], f"seed {seed}"


def test_a_row_of_masked_logits_poisons_nobody():
    """A greedy row with one allowed token, all others at minus infinity, beside rows that draw."""
    logits = random_logits(11, 3)
    logits[0, :] = -np.inf
    logits[0, 5] = 1.0
    asks = [greedy(allowed_token_ids=ints(5)), greedy(temperature=0.8, seed=3), greedy(temperature=0.8, top_p=0.9)]
    together = sample(logits, asks).token_ids.tolist()
    assert together == [5, *(int(sample(logits[i : i + 1], [asks[i]]).token_ids[0]) for i in (1, 2))]


def test_penalties_count_no_padding():
    """Prompts of 3 and of 30 tokens in one batch: each draws what it draws alone, also where little decides it."""
    draw = np.random.default_rng(12)
    for seed in range(20):
        logits = draw.integers(-3, 4, (2, V)).astype(np.float32)
        ask = greedy(frequency_penalty=1.05, presence_penalty=0.1, repetition_penalty=1.01, temperature=0.8, seed=seed)
        prompts = [draw.integers(0, 12, n).tolist() for n in (3, 30)]
        outputs = [draw.integers(0, 12, n).tolist() for n in (25, 2)]
        together = sample(logits, [ask, ask], prompts, outputs).token_ids.tolist()
        alone = [int(sample(logits[i : i + 1], [ask], [prompts[i]], [outputs[i]]).token_ids[0]) for i in range(2)]
        assert together == alone, f"seed {seed}"


def test_seed_choice_and_position_each_change_the_draw():
    logits = np.zeros((1, 49_152), np.float32)
    draws = {
        int(sample(logits, [greedy(temperature=1.0, seed=s, choice=c)], outputs=[[1] * p]).token_ids[0])
        for s in (0, 1, 2**63)
        for c in (0, 1)
        for p in (0, 1, 2)
    }
    assert len(draws) == 18


# ---- penalties, biases, masks -------------------------------------------------------------------------------


def adjusted(logits, prompt, output, *, repetition=1.0, presence=0.0, frequency=0.0, bias=()) -> list[float]:
    values = [float(x) for x in logits]
    for token, value in bias:
        values[token] += value
    for token in range(len(values)):
        if token in prompt or token in output:
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        if token in output:
            values[token] -= presence + frequency * output.count(token)
    return values


@pytest.mark.parametrize("seed", range(40))
def test_penalties_and_bias_against_a_loop(seed):
    rng = random.Random(seed)
    logits = random_logits(seed, spread=1.0)
    prompt = [rng.randrange(20) for _ in range(rng.randint(1, 10))]
    output = [rng.randrange(20) for _ in range(rng.randint(0, 30))]
    bias = [(t, rng.uniform(-4, 4)) for t in rng.sample(range(V), rng.choice([0, 0, 8]))]
    values = {
        "repetition": rng.choice([1.0, 0.5, 1.3, 10.0]),
        "presence": rng.choice([0.0, -2.0, 1.5]),
        "frequency": rng.choice([0.0, 0.25, -0.3]),
    }
    ask = greedy(
        **{f"{name}_penalty": value for name, value in values.items()},
        bias_token_ids=ints(*(t for t, _ in bias)),
        bias_values=floats(*(v for _, v in bias)),
    )
    expected = adjusted(logits[0], prompt, output, bias=bias, **values)
    got = sample(logits, [ask], [prompt], [output])
    assert got.token_ids.tolist() == [int(np.argmax(expected))], f"seed {seed}"


def test_repetition_counts_prompt_and_output_but_presence_only_output():
    logits = np.zeros((1, V), np.float32)
    logits[0, [3, 4, 5]] = [3.0, 2.9, 2.8]
    ask_repetition, ask_presence = greedy(repetition_penalty=2.0), greedy(presence_penalty=1.0)
    assert sample(logits, [ask_repetition], [[3]], [[4]]).token_ids.tolist() == [5]
    assert sample(logits, [ask_presence], [[3]], [[4]]).token_ids.tolist() == [3]
    assert sample(logits, [ask_presence], [[4]], [[3]]).token_ids.tolist() == [4]


def test_an_extreme_penalty_stays_finite():
    logits = random_logits(4) + 20
    for temperature in (0.0, 1.0):
        ask = greedy(repetition_penalty=1e-38, temperature=temperature, seed=1)
        assert sample(logits, [ask], [[7]]).token_ids.tolist() == [7]


def test_adjusting_leaves_the_logits_alone():
    logits = random_logits(6)
    before = logits.copy()
    sample(logits, [greedy(repetition_penalty=2.0, bias_token_ids=ints(1), bias_values=floats(9), temperature=0.5)])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature):
    logits = random_logits(7, 30)
    asks = [greedy(temperature=temperature, seed=i, allowed_token_ids=ints(8, 3, 150)) for i in range(30)]
    assert set(sample(logits, asks).token_ids.tolist()) <= {3, 8, 150}


@pytest.mark.parametrize(("num_output", "barred"), [(0, True), (1, True), (2, False), (3, False)])
def test_stop_tokens_are_barred_while_fewer_than_min_tokens_exist(num_output, barred):
    logits = np.zeros((1, V), np.float32)
    logits[0, [9, 10, 11]] = [3, 2, 1]
    ask = greedy(min_tokens=2, stop_token_ids=ints(9, 10))
    expected = 11 if barred else 9
    assert sample(logits, [ask], outputs=[[1] * num_output]).token_ids.tolist() == [expected]


def test_min_tokens_gives_way_when_only_stop_tokens_are_allowed():
    ask = greedy(min_tokens=5, stop_token_ids=ints(4), allowed_token_ids=ints(4), temperature=1.0)
    assert sample(random_logits(9), [ask]).token_ids.tolist() == [4]


# ---- logprobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_of_the_unmodified_distribution(num_top):
    logits = random_logits(10, 3)
    ask = greedy(temperature=0.5, seed=4, top_k=3, bias_token_ids=ints(100), bias_values=floats(50), logprobs=num_top)
    output = sample(logits, [greedy(), ask, greedy()], rows=[2, 5, 7])
    assert output.token_ids[1] == 100
    [entry] = output.logprobs
    exact = logits[1].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    ranked = sorted(range(V), key=lambda i: (-logits[1][i], i))
    assert entry.row == 5
    assert entry.logprob == pytest.approx(exact[100], abs=1e-5)
    assert entry.rank == ranked.index(100) + 1
    assert np.frombuffer(entry.top_token_ids, "<i4").tolist() == ranked[:num_top]
    assert np.frombuffer(entry.top_logprobs, "<f4") == pytest.approx(exact[ranked[:num_top]], abs=1e-5)


def test_equal_logits_share_a_rank_and_rank_by_id():
    logits = np.zeros((1, V), np.float32)
    logits[0, [5, 90]] = 2
    [entry] = sample(logits, [greedy(logprobs=4)]).logprobs
    assert entry.rank == 1
    assert np.frombuffer(entry.top_token_ids, "<i4").tolist() == [5, 90, 0, 1]


def test_a_vocabulary_smaller_than_the_asked_logprobs():
    [entry] = sample(random_logits(1, 1, 4), [greedy(logprobs=20)]).logprobs
    assert len(np.frombuffer(entry.top_token_ids, "<i4")) == 4


def test_impossible_tokens_have_minus_infinity():
    logits = random_logits(11)
    logits[0, 10:] = -np.inf
    [entry] = sample(logits, [greedy(logprobs=12)]).logprobs
    assert np.isneginf(np.frombuffer(entry.top_logprobs, "<f4")[10:]).all()

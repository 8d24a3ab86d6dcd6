"""The compiled race draws what numpy draws, to the token: many rows, ties, every temperature, buffers that overflow."""

import shutil

import numpy as np
import pytest

from executor_svc import race
from executor_svc.noise import NoiseSource, draw_bits, draw_key, mixed_ids
from executor_svc.sampler import Sampler
from executor_svc.sampling import SamplingTable
from tests.unit.executor.plans import greedy, ints

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("native")


def both(built, logits: np.ndarray, asks: list, num_threads: int = 2) -> tuple[list[int], list[int]]:
    count, vocab = logits.shape
    table = SamplingTable(count, vocab)
    for row, ask in enumerate(asks):
        table.set(row, ask)
    rows, known = np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32) % 7 + 1
    tokens = np.tile(np.arange(8, dtype=np.int32) % vocab, (count, 1))
    batch = table.select(rows, tokens, np.ones(count, np.int32), known)
    fast = race.load_race(built, vocab, num_threads)
    assert fast is not None
    return [Sampler(vocab, r).sample(logits, batch).token_ids.tolist() for r in (None, fast)]


@needs_compiler
@pytest.mark.parametrize("seed", range(6))
def test_the_same_tokens(built, seed):
    rng = np.random.default_rng(seed)
    vocab = [2, 17, 1024, 1025, 5000, 49_152][seed]
    count = [300, 300, 100, 100, 64, 64][seed]
    logits = (rng.standard_normal((count, vocab)) * rng.choice([0, 0.01, 1, 3, 30], (count, 1))).astype(np.float32)
    logits[::5] = np.round(logits[::5])  # ties
    logits[3::7, rng.integers(0, vocab)] = -np.inf
    logits[:, 0] = np.maximum(logits[:, 0], -1e30)
    asks = [
        greedy(
            temperature=float(rng.choice([0.0, 1e-5, 0.3, 1.0, 1.0, 1.7, 2.0])),
            seed=int(rng.integers(0, 2**63)) * 2 + 1,
            choice=int(rng.integers(0, 16)),
            top_p=float(rng.choice([1.0, 1.0, 1.0, 0.9])),
            top_k=int(rng.choice([0, 0, 0, 1, vocab])),
            frequency_penalty=float(rng.choice([0, 0, 0.5])),
        )
        for _ in range(count)
    ]
    slow, fast = both(built, logits, asks, num_threads=1 + seed % 3)
    assert slow == fast, f"seed {seed}"


@needs_compiler
def test_all_tokens_contend(built):
    """Equal logits and unlucky favourites: contenders by the thousand, more than the buffers hold at once."""
    logits = np.zeros((40, 3000), np.float32)
    slow, fast = both(built, logits, [greedy(temperature=1.0, seed=i) for i in range(40)])
    assert slow == fast
    assert len(set(slow)) > 30


@needs_compiler
def test_a_masked_row(built):
    logits = np.random.default_rng(1).standard_normal((9, 200)).astype(np.float32)
    asks = [greedy(temperature=1.0, seed=i, allowed_token_ids=ints(3, 150)) for i in range(9)]
    slow, fast = both(built, logits, asks)
    assert slow == fast
    assert set(slow) == {3, 150}


def test_bits_of_many_keys_are_those_of_each():
    keys = np.array([draw_key(seed, 1, 2) for seed in range(20)], np.uint64)
    ids = np.arange(20) * 7
    want = [int(NoiseSource(200).all_bits(int(key))[token]) for key, token in zip(keys, ids, strict=True)]
    assert draw_bits(mixed_ids(200)[ids], keys).tolist() == want


def test_without_a_compiler_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(race.shutil, "which", lambda name: None)
    assert race.load_race(tmp_path, 10, 1) is None


def test_a_compiler_that_fails_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(race.shutil, "which", lambda name: "/bin/false")
    told: list[str] = []
    assert race.load_race(tmp_path, 10, 1, told.append) is None
    assert "numpy" in told[0]

"""The prefix index against its formula in plain integers, and against hashes that lie."""

import numpy as np

from scheduler_svc.core.prefix_index import KEY_BYTES, PrefixIndex, root

SIZE = 4
ROOT = root(b"key", "tenant", b"salt")


def index(num_blocks: int = 8) -> tuple[PrefixIndex, np.ndarray]:
    tokens = np.zeros((num_blocks, SIZE), np.int32)
    return PrefixIndex(b"key", tokens), tokens


def keys_of(prefixes: PrefixIndex, tokens: np.ndarray) -> bytes:
    return prefixes.hashes(ROOT, tokens)[:, SIZE - 1 :: SIZE].T.tobytes()


def test_hashes_are_the_sums_they_are_said_to_be() -> None:
    prefixes, _ = index()
    tokens = np.array([3, 0, 2**31 - 1, 7, 7], np.int32)
    sums = prefixes.hashes(ROOT, tokens)
    for lane in range(2):
        value = int(ROOT[lane])
        for position, token in enumerate(tokens.tolist()):
            value = (value + (token + 1) * int(prefixes._secrets[lane, position])) % 2**64
            assert int(sums[lane, position]) == value


def test_a_hash_goes_on_from_any_position_also_when_more_secrets_are_needed() -> None:
    prefixes, _ = index()
    tokens = np.random.default_rng(1).integers(0, 1000, 5000).astype(np.int32)
    early = prefixes.hashes(ROOT, tokens[:700])
    assert (prefixes.hashes(ROOT, tokens)[:, :700] == early).all()
    for first in (1, 699, 700):
        chain = early[:, first - 1]
        assert (prefixes.hashes(chain, tokens[first:], first) == prefixes.hashes(ROOT, tokens)[:, first:]).all()
    other = PrefixIndex(b"other key", np.zeros((1, SIZE), np.int32))
    assert not (other.hashes(ROOT, tokens) == prefixes.hashes(ROOT, tokens)).any()


def test_a_hash_is_not_believed_without_its_tokens_and_its_root() -> None:
    prefixes, held = index()
    tokens = np.arange(12, dtype=np.int32)
    keys = keys_of(prefixes, tokens)
    blocks = np.array([5, 2, 7])
    held[blocks] = tokens.reshape(-1, SIZE)
    assert prefixes.publish(blocks, keys, ROOT).tolist() == [5, 2, 7]
    assert prefixes.find(keys, tokens, ROOT, 3) == [5, 2, 7]
    assert prefixes.find(keys, tokens, ROOT, 2) == [5, 2]
    assert prefixes.find(keys, tokens, ROOT, 0) == []
    held[7, 3] = 99  # as if another prefix had the same hash
    assert prefixes.find(keys, tokens, ROOT, 3) == [5, 2]
    held[5, 0] = 99
    assert prefixes.find(keys, tokens, ROOT, 3) == []
    held[blocks] = tokens.reshape(-1, SIZE)
    assert prefixes.find(keys, tokens, root(b"key", "another", b""), 3) == []


def test_a_prefix_keeps_the_block_it_has_until_that_is_forgotten() -> None:
    prefixes, held = index()
    tokens = np.arange(8, dtype=np.int32)
    keys = keys_of(prefixes, tokens)
    held[[0, 1, 2, 3]] = np.tile(tokens.reshape(-1, SIZE), (2, 1))
    assert prefixes.publish(np.array([0]), keys[:KEY_BYTES], ROOT).tolist() == [0]
    assert prefixes.publish(np.array([2, 3]), keys, ROOT).tolist() == [3]
    assert prefixes.find(keys, tokens, ROOT, 2) == [0, 3]
    prefixes.forget([0])
    assert prefixes.find(keys, tokens, ROOT, 2) == []
    assert prefixes.publish(np.array([2]), keys[:KEY_BYTES], ROOT).tolist() == [2]
    assert prefixes.find(keys, tokens, ROOT, 2) == [2, 3]

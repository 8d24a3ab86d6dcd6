"""The prefix index: from the tokens of a prefix to the block that holds their keys and values.

Knows tokens and block numbers, not who owns them. A full block is found under a keyed 128-bit hash of everything up to
and including it. The hash is a sum, over all positions p of the prefix, of token[p] times a secret 64-bit number for
p, in two lanes modulo 2^64, on top of a keyed root made from tenant and salt:

    hash[i] = root(tenant, salt) + sum over p < (i + 1) * block_size of (token[p] + 1) * secret[lane, p]

Being a sum, the hashes of a whole prompt are one numpy pass, a hash is continued by adding, and every prefix has one,
not only those that end with a block; its numbers being secret and different at each position, a collision cannot be
planned (a polynomial in one secret would not do: its collisions modulo 2^64 do not depend on the secret). And a hash
alone is never believed: the tokens of each block and the root of its chain are compared on a hit.
"""

import hashlib

import numpy as np

KEY_BYTES = 16
KEY = np.dtype(f"V{KEY_BYTES}")


class PrefixIndex:
    def __init__(self, hash_key: bytes, tokens: np.ndarray):
        """`tokens` [num_blocks, block_size]: what each block holds; kept by the owner, compared here."""
        num_blocks, block_size = tokens.shape
        self.block_size = block_size
        self._seed = hashlib.blake2b(b"positions", key=hash_key[:64]).digest()
        # secret numbers [lane, position], extended as longer prefixes come
        self._secrets = np.empty((2, 0), np.uint64)
        # Hash of a prefix -> the block with its last tokens. All and only named blocks.
        self._block_of: dict[bytes, int] = {}
        # Meaningful for named blocks.
        self._hash_of = np.zeros((num_blocks, 2), np.uint64)
        self._tokens = tokens
        # The root of a named block's chain, its first lane.
        self._roots = np.zeros(num_blocks, np.uint64)

    def hashes(self, chain: np.ndarray, tokens: np.ndarray, first: int = 0) -> np.ndarray:
        """uint64 [2, len(tokens)]: of every prefix that ends in `tokens`, which begin at position `first`; `chain` [2]
        is that of the tokens before."""
        end = first + len(tokens)
        self._reserve(end)
        terms = np.add(tokens, 1, dtype=np.uint64, casting="unsafe") * self._secrets[:, first:end]
        sums = np.add.accumulate(terms, axis=1, out=terms)
        sums += chain[:, None]
        return sums

    def find(self, keys: bytes, tokens: np.ndarray, root: np.ndarray, max_blocks: int) -> list[int]:
        """The blocks of the longest known prefix, at most `max_blocks` of them."""
        hits: list[int] = []
        get = self._block_of.get
        if not max_blocks or get(keys[:KEY_BYTES]) is None:
            return hits
        for block in map(get, np.frombuffer(keys, KEY, max_blocks).tolist()):
            if block is None:
                break
            hits.append(block)
        found = np.array(hits)
        wanted = tokens[: len(hits) * self.block_size].reshape(len(hits), self.block_size)
        same = self._tokens.take(found, axis=0) == wanted
        mine = self._roots.take(found) == root[0]
        if same.all() and mine.all():
            return hits
        return hits[: int((same.all(axis=1) & mine).argmin())]

    def publish(self, blocks: np.ndarray, keys: bytes, root: np.ndarray) -> np.ndarray:
        """Names blocks by `keys`, 16 bytes each. Returns those it did name: a prefix with a block keeps that one."""
        wanted = blocks.tolist()
        claimed = list(map(self._block_of.setdefault, np.frombuffer(keys, KEY).tolist(), wanted))
        self._hash_of[blocks] = np.frombuffer(keys, "<u8").reshape(-1, 2)
        self._roots[blocks] = root[0]
        return blocks if claimed == wanted else blocks[np.array(claimed) == blocks]

    def forget(self, blocks: list[int]) -> None:
        for key in _keys(self._hash_of[blocks]):
            del self._block_of[key]

    # ---- of named blocks, for those who watch ----

    def first_lane(self, blocks: np.ndarray) -> np.ndarray:
        """uint64 [n]: half of their hashes."""
        return self._hash_of[blocks, 0]

    def roots(self, blocks: np.ndarray) -> np.ndarray:
        """uint64 [n]: the first lane of the roots of their chains."""
        return self._roots[blocks]

    def tokens_of(self, blocks: np.ndarray) -> np.ndarray:
        """int32 [n, block_size], a copy."""
        return self._tokens[blocks]

    def parents(self, blocks: np.ndarray, places: np.ndarray) -> np.ndarray:
        """uint64 [n]: the first lane of the hash of the prefix before each block, the `places[i]`-th; n > 0."""
        size = self.block_size
        self._reserve((int(places.max()) + 1) * size)
        positions_NB = places[:, None] * size + np.arange(size)
        tokens_NB = np.add(self._tokens[blocks], 1, dtype=np.uint64, casting="unsafe")
        return self._hash_of[blocks, 0] - (tokens_NB * self._secrets[0][positions_NB]).sum(axis=1, dtype=np.uint64)

    def _reserve(self, num_positions: int) -> None:
        """Prefixes get so long."""
        if num_positions <= self._secrets.shape[1]:
            return
        num_positions = max(1024, 1 << (num_positions - 1).bit_length())
        lanes = [hashlib.shake_256(self._seed + bytes([lane])).digest(num_positions * 8) for lane in range(2)]
        self._secrets = np.frombuffer(b"".join(lanes), "<u8").reshape(2, num_positions)

    def check(self, is_named: np.ndarray) -> None:
        assert sorted(self._block_of.values()) == is_named.nonzero()[0].tolist()
        for key, block in self._block_of.items():
            assert self._hash_of[block].tobytes() == key, block


def _keys(hashes: np.ndarray) -> list[bytes]:
    return np.ascontiguousarray(hashes).view(KEY).ravel().tolist()


def root(hash_key: bytes, tenant: str, salt: bytes) -> np.ndarray:
    """uint64 [2]: where a chain begins. Each part is tagged with its name and length: no two pairs run together."""
    name = tenant.encode()
    message = b"tenant%d:%bsalt%d:%b" % (len(name), name, len(salt), salt)
    return np.frombuffer(hashlib.blake2b(message, key=hash_key[:64], digest_size=KEY_BYTES).digest(), "<u8")

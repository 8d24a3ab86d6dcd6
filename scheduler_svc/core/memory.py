"""Memory: the block pool and the prefix index together, in terms of sequences.

Knows which tokens are in which blocks. Publishing follows two rules, which in-order execution makes safe: a block of
tokens that are all known is published when the step that computes them is planned; a block of drawn tokens once the
last of them is known and computed.
"""

from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_index import KEY_BYTES, PrefixIndex
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


class Memory:
    def __init__(self, num_blocks: int, block_size: int, hash_key: bytes | None):
        """`hash_key` None: nothing is shared but between the choices of one request."""
        self.block_size = block_size
        # What each block holds, once it was full.
        self.tokens = np.zeros((num_blocks, block_size), np.int32)
        self.index = PrefixIndex(hash_key, self.tokens) if hash_key is not None else None
        self.pool = BlockPool(num_blocks, self.index.forget) if self.index is not None else BlockPool(num_blocks)

    # ---- before admission --------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks with its leading tokens, of those that it may skip."""
        if self.index is None:
            return []
        keys, tokens = self._hash(sequence)
        max_blocks = sequence.num_skippable // self.block_size
        return self.index.find(keys, tokens, sequence.state_of_request.root, max_blocks)

    def num_common_blocks(self, sequence: Sequence, other: Sequence) -> int:
        """How many leading blocks two waiting or catching-up sequences have in common."""
        assert sequence.keys is not None
        assert other.keys is not None
        a = np.frombuffer(sequence.keys, "<u8").reshape(-1, 2)
        b = np.frombuffer(other.keys, "<u8").reshape(-1, 2)
        count = min(len(a), len(b))
        same = (a[:count] == b[:count]).all(axis=1)
        return count if same.all() else int(same.argmin())

    def key_at(self, sequence: Sequence, block: int) -> bytes | None:
        """The hash of its prefix up to and including this block, if that block is full of known tokens."""
        keys = sequence.keys
        if keys is None or (block + 1) * KEY_BYTES > len(keys):
            return None
        return keys[block * KEY_BYTES : (block + 1) * KEY_BYTES]

    def _hash(self, sequence: Sequence) -> tuple[bytes, np.ndarray]:
        assert self.index is not None
        tokens = sequence.tokens()
        if sequence.keys is None or len(sequence.keys) // KEY_BYTES != len(tokens) // self.block_size:
            sequence.keys = self.index.hashes(sequence.state_of_request.root, tokens).tobytes()
        return sequence.keys, tokens

    # ---- while it runs -----------------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, rows: Rows, num_shared: int) -> None:
        """Just seated, with `num_shared` blocks from others: sets where publishing goes on."""
        sequence.num_published = num_shared
        if self.index is not None:
            keys, _ = self._hash(sequence)
            chain = np.frombuffer(keys[-KEY_BYTES:], "<u8") if keys else sequence.state_of_request.root
            rows.chain[sequence.row] = chain
            self.index.reserve(sequence.worst_blocks)

    def publish_known(self, sequence: Sequence, num_computed: int) -> None:
        """A step was planned after which `num_computed` tokens, all known, are computed."""
        first, end = sequence.num_published, num_computed // self.block_size
        if end <= first:
            return
        sequence.num_published = end
        if self.index is not None:
            keys, tokens = self._hash(sequence)
            self._publish(sequence, first, end, np.frombuffer(keys, "<u8").reshape(-1, 2)[first:], tokens)

    def publish_drawn(self, rows: Rows, full: np.ndarray) -> None:
        """In each of these rows the next block has become full of drawn tokens that are computed."""
        places, blocks, tokens = rows.take_full(full)
        self.tokens[blocks] = tokens
        if self.index is not None:
            chains = self.index.next_hashes(rows.chain.take(full, axis=0), places, tokens)
            rows.chain[full] = chains
            self.pool.name(self.index.publish(blocks, chains, rows.root.take(full)))

    # ---- at the end --------------------------------------------------------------------------------------------

    def retire(self, sequence: Sequence) -> None:
        """Publishes what became full meanwhile and gives the blocks back. The sequence has no row."""
        end = min(sequence.num_computed, sequence.num_logged) // self.block_size
        first = sequence.num_published
        if self.index is not None and sequence.blocks and end > first:
            tokens = sequence.tokens()
            assert sequence.chain is not None
            hashes = self.index.hashes(sequence.chain, tokens[first * self.block_size :], first)
            self._publish(sequence, first, end, hashes, tokens)
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.num_published = 0

    def _publish(self, sequence: Sequence, first: int, end: int, hashes: np.ndarray, tokens: np.ndarray) -> None:
        """Offers blocks first..end; `hashes` begins with that of `first`, `tokens` with the sequence."""
        assert self.index is not None
        blocks = sequence.blocks[first:end]
        size = self.block_size
        self.tokens[blocks] = tokens[first * size : end * size].reshape(-1, size)
        self.pool.name(self.index.publish(blocks, hashes[: end - first], sequence.state_of_request.root[0]))

    def check(self, tables: Iterable[list[int]]) -> None:
        self.pool.check(tables)
        if self.index is not None:
            self.index.check(self.pool.is_named)

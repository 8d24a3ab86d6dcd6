"""Memory: the block pool and the prefix index together, in terms of sequences.

Knows which tokens are in which blocks. Publishing follows two rules, which in-order execution makes safe: a block of
tokens that are all known is published when the step that computes them is planned; a block of drawn tokens once the last
of them is known and computed.
"""

from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_index import KEY_BYTES, PrefixIndex
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


class Memory:
    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None):
        self.block_size = block_size
        self.index = index
        self.pool = BlockPool(num_blocks, index.forget) if index else BlockPool(num_blocks)

    # ---- before admission --------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks with its leading tokens. Never its last known token: that one's logits are needed."""
        if self.index is None:
            return []
        keys, tokens = self._hash(sequence)
        max_blocks = (sequence.num_logged - 1) // self.block_size
        return self.index.find(keys, tokens, sequence.state_of_request.root, max_blocks)

    def num_common_blocks(self, sequence: Sequence, other: Sequence) -> int:
        """How many leading blocks two waiting or catching-up sequences have in common."""
        if self.index is None or sequence.keys is None or other.keys is None:
            return 0
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
        if sequence.keys is None:
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

    def publish_known(self, sequence: Sequence, num_computed: int) -> None:
        """A step was planned after which `num_computed` tokens, all known, are computed."""
        first, end = sequence.num_published, num_computed // self.block_size
        if end <= first:
            return
        sequence.num_published = end
        if self.index is not None:
            keys, tokens = self._hash(sequence)
            self._publish(sequence, first, end, keys[first * KEY_BYTES :], tokens)

    def publish_drawn(self, sequences: list[Sequence], rows: Rows, row_indices: np.ndarray) -> None:
        """In each of these rows the next block has become full of drawn tokens that are computed; logs them too."""
        tokens = rows.last_block(row_indices)
        ends = rows.committed[row_indices] - 1
        row_bytes = self.block_size * 4
        data = tokens.tobytes()
        for i, (sequence, end) in enumerate(zip(sequences, ends.tolist(), strict=True)):
            fresh = (end - sequence.num_logged) * 4
            sequence.log += data[(i + 1) * row_bytes - fresh : (i + 1) * row_bytes]
            sequence.num_published += 1
            sequence.keys = None
        if self.index is None:
            return
        which = ends // self.block_size - 1
        chains = self.index.next_hashes(rows.chain[row_indices], which, tokens)
        rows.chain[row_indices] = chains
        keys = chains.tobytes()
        blocks = [sequence.blocks[b] for sequence, b in zip(sequences, which.tolist(), strict=True)]
        self.index.hold(blocks, tokens)
        for i, (sequence, block) in enumerate(zip(sequences, blocks, strict=True)):
            if self.index.publish(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], block, sequence.state_of_request.root):
                self.pool.name(block)

    # ---- at the end --------------------------------------------------------------------------------------------

    def retire(self, sequence: Sequence) -> None:
        """Publishes what became full meanwhile and gives the blocks back. The sequence has no row."""
        end = min(sequence.num_computed, sequence.num_logged) // self.block_size
        first = sequence.num_published
        if self.index is not None and sequence.blocks and end > first:
            tokens = sequence.tokens()
            assert sequence.chain is not None
            keys = self.index.hashes(sequence.chain, tokens[first * self.block_size :], first).tobytes()
            self._publish(sequence, first, end, keys, tokens)
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.num_published = 0

    def _publish(self, sequence: Sequence, first: int, end: int, keys: bytes, tokens: np.ndarray) -> None:
        """Offers blocks first..end; `keys` begins with that of `first`, `tokens` with the sequence."""
        assert self.index is not None
        blocks = sequence.blocks[first:end]
        size = self.block_size
        self.index.hold(blocks, tokens[first * size : end * size].reshape(-1, size))
        root = sequence.state_of_request.root
        for i, block in enumerate(blocks):
            if self.index.publish(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES], block, root):
                self.pool.name(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        self.pool.check(tables)
        if self.index is not None:
            self.index.check(self.pool.is_named)

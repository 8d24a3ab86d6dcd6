"""Memory: the block pool and the prefix index together, in terms of sequences.

Knows which tokens are in which blocks, and when a block is published so that others may share it. In-order execution
makes two rules safe: a block of tokens that are all known is published when the step that computes them is planned; a
block of drawn tokens may be once the last of them is known and its computation planned.

Drawn tokens may be published, but nobody does for each stream in each step what hardly anybody asks for. They are when
the sequence leaves its row; or when somebody comes whose prompt goes on as the stream did. To find it, a stream is
filed under the hash of its tokens up to where publishing stands: all it knew when it settled. The hash being a sum,
whoever comes knows that of each of its own prefixes.
"""

from collections.abc import Iterable

import numpy as np

from scheduler_svc.core.block_events import BlockEvents
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_index import KEY_BYTES, PrefixIndex
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


class Memory:
    def __init__(self, num_blocks: int, block_size: int, hash_key: bytes | None):
        """`hash_key` None: nothing is shared but between the choices of one request."""
        self.block_size = block_size
        self.index: PrefixIndex | None = None
        self.pool = BlockPool(num_blocks)
        if hash_key is not None:
            # What each named block holds.
            self.tokens = np.zeros((num_blocks, block_size), np.int32)
            self.index = PrefixIndex(hash_key, self.tokens)
            self.pool = BlockPool(num_blocks, self._forget)
        # Sequences that decode, by `found_under`.
        self._streams: dict[bytes, list[Sequence]] = {}
        # None: nobody listens.
        self.events: BlockEvents | None = None

    def listen(self, is_on: bool) -> None:
        """From now on block events are recorded, or no longer."""
        self.events = BlockEvents(self.index, self.pool.is_named) if is_on and self.index is not None else None

    # ---- before admission --------------------------------------------------------------------------------------

    def find_prefix(self, sequence: Sequence, rows: Rows) -> list[int]:
        """Blocks with its leading tokens, of those that it may skip."""
        if self.index is None:
            return []
        keys, tokens = self._hash(sequence)
        max_blocks = sequence.num_skippable // self.block_size
        root = sequence.state_of_request.root
        hits = self.index.find(keys, tokens, root, max_blocks)
        while len(hits) < max_blocks and self._ask_streams(sequence, len(hits), tokens, rows):
            hits = self.index.find(keys, tokens, root, max_blocks)
        return hits

    def num_common_blocks(self, sequence: Sequence, other: Sequence) -> int:
        """How many leading blocks two waiting or catching-up sequences have in common."""
        a = np.frombuffer(sequence.keys, "<u8").reshape(-1, 2)
        b = np.frombuffer(other.keys, "<u8").reshape(-1, 2)
        count = min(len(a), len(b))
        same = (a[:count] == b[:count]).all(axis=1)
        return count if same.all() else int(same.argmin())

    def key_at(self, sequence: Sequence, block: int) -> bytes | None:
        """The hash of its prefix up to and including this block, if that block is full of known tokens."""
        return sequence.keys[block * KEY_BYTES : (block + 1) * KEY_BYTES] or None

    def _hash(self, sequence: Sequence) -> tuple[bytes, np.ndarray]:
        """The keys of its full blocks, and its tokens. Goes on from what was hashed before."""
        assert self.index is not None
        tokens = sequence.tokens()
        if sequence.num_hashed < len(tokens):
            first = len(sequence.keys) // KEY_BYTES * self.block_size
            sums = self.index.hashes(self._chain(sequence, first), tokens[first:], first)
            sequence.keys += sums[:, self.block_size - 1 :: self.block_size].T.tobytes()
            sequence.whole_key = sums[:, -1].tobytes()
            sequence.num_hashed = len(tokens)
        return sequence.keys, tokens

    def _chain(self, sequence: Sequence, num_tokens: int) -> np.ndarray:
        """uint64 [2]: the hash of its first so many tokens, whole blocks of them."""
        if not num_tokens:
            return sequence.state_of_request.root
        end = num_tokens // self.block_size * KEY_BYTES
        return np.frombuffer(sequence.keys[end - KEY_BYTES : end], "<u8")

    # ---- while it runs -----------------------------------------------------------------------------------------

    def publish_known(self, sequence: Sequence, num_computed: int) -> None:
        """A step was planned after which `num_computed` tokens, all known, are computed."""
        self._publish(sequence, sequence.blocks, num_computed)

    def settled(self, sequence: Sequence) -> None:
        """It draws tokens from here on."""
        if self.index is not None:
            self._file(sequence, sequence.whole_key)

    def unfile(self, sequence: Sequence) -> None:
        """It is no stream any more."""
        if sequence.found_under is None:
            return
        streams = self._streams[sequence.found_under]
        streams.remove(sequence)
        if not streams:
            del self._streams[sequence.found_under]
        sequence.found_under = None

    def _file(self, sequence: Sequence, key: bytes) -> None:
        self._streams.setdefault(key, []).append(sequence)
        sequence.found_under = key

    def _ask_streams(self, sequence: Sequence, block: int, tokens: np.ndarray, rows: Rows) -> bool:
        """Publishes a stream that has this block of `sequence`, which nobody has published. Whether there is one."""
        if not self._streams:
            return False
        assert self.index is not None
        first = block * self.block_size
        wanted = tokens[first : first + self.block_size]
        chain = self._chain(sequence, first)
        sums = self.index.hashes(chain, wanted[:-1], first)
        for key in [chain.tobytes(), *map(bytes, sums.T.copy())]:
            for stream in self._streams.get(key, ()):
                if self._holds(stream, block, wanted, rows):
                    self.unfile(stream)
                    self._publish(stream, rows.blocks(stream.row), rows.num_computed(stream.row))
                    self._file(stream, stream.keys[(stream.num_published - 1) * KEY_BYTES :][:KEY_BYTES])
                    return True
        return False

    def _holds(self, stream: Sequence, block: int, wanted: np.ndarray, rows: Rows) -> bool:
        """Whether its next block to publish is this one, full and computed."""
        rows.fold(stream)
        end = (block + 1) * self.block_size
        return (
            stream.num_published == block
            and end <= min(stream.num_logged, rows.num_computed(stream.row))
            and stream.log[4 * (end - self.block_size) : 4 * end] == wanted.tobytes()
        )

    # ---- at the end --------------------------------------------------------------------------------------------

    def retire(self, sequence: Sequence) -> None:
        """Publishes what became full meanwhile and gives the blocks back. The sequence has no row."""
        if sequence.blocks:
            self._publish(sequence, sequence.blocks, sequence.num_computed)
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.num_published = 0

    def _publish(self, sequence: Sequence, blocks: list[int], num_computed: int) -> None:
        """Offers its full blocks of known tokens that so many computed ones fill, as far as that was not done."""
        size = self.block_size
        first, end = sequence.num_published, min(num_computed, sequence.num_logged) // size
        if end <= first:
            return
        sequence.num_published = end
        if self.index is None:
            return
        keys, tokens = self._hash(sequence)
        mine = np.array(blocks[first:end])
        self.tokens[mine] = tokens[first * size : end * size].reshape(-1, size)
        named = self.index.publish(mine, keys[first * KEY_BYTES : end * KEY_BYTES], sequence.state_of_request.root)
        self._name(named, mine, range(first, end))

    def _name(self, named: np.ndarray, blocks: "list[int] | np.ndarray", places: "range | np.ndarray") -> None:
        """The index took the names of `named`, some of `blocks`, which are the `places`-th of their prefixes."""
        self.pool.name(named)
        if self.events is not None:
            self.events.named(named, np.asarray(places)[np.isin(blocks, named)])

    def _forget(self, blocks: list[int]) -> None:
        assert self.index is not None
        if self.events is not None:
            self.events.forgotten(blocks)
        self.index.forget(blocks)

    def check(self, tables: Iterable[list[int]], running: Iterable[Sequence]) -> None:
        self.pool.check(tables)
        if self.index is not None:
            self.index.check(self.pool.is_named)
            streams = [stream for key in self._streams for stream in self._streams[key]]
            assert len(streams) == len({id(stream) for stream in streams})
            assert {id(stream) for stream in streams} == {id(s) for s in running if s.settled_step is not None}
            for key in self._streams:
                assert all(stream.found_under == key for stream in self._streams[key])

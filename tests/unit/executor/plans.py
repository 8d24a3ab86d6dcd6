"""Wire messages written by hand, and a toy scheduler that drives a worker with random but correct plans."""

import random
from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.wire.v1 import step_pb2


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def geometry(**changes: int) -> step_pb2.Geometry:
    values = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_model_len": 64,
        "max_num_batched_tokens": 64,
        "vocab_size": 1000,
    }
    return step_pb2.Geometry(**{**values, **changes})


def greedy(**changes: object) -> step_pb2.Sampling:
    values: dict = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return step_pb2.Sampling(**{**values, **changes})


def admit(row: int, tokens: list[int], blocks: list[int], **changes: object) -> step_pb2.Admit:
    values: dict = {
        "row": row,
        "token_ids": ints(*tokens),
        "num_prompt_tokens": len(tokens),
        "block_ids": ints(*blocks),
        "sampling": greedy(),
    }
    return step_pb2.Admit(**{**values, **changes})


def plan(step_id: int = 1, **fields: object) -> step_pb2.StepPlan:
    return step_pb2.StepPlan(boot_id=1, epoch=1, step_id=step_id, **fields)  # type: ignore[arg-type]


@dataclass
class ToySequence:
    tokens: list[int]
    num_prompt: int
    want: int  # output tokens
    sampling: step_pb2.Sampling
    row: int | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class ToyScheduler:
    """Seats, chunks, rests, preempts and resumes at random; blocks come from a shuffled pool."""

    def __init__(self, rng: random.Random, shape: step_pb2.Geometry, sequences: list[ToySequence]):
        self.rng, self.shape = rng, shape
        self.waiting, self.running = list(sequences), []
        self.rows = list(range(shape.max_num_seqs))
        self.free = list(range(shape.num_blocks))
        rng.shuffle(self.free)
        self.released: list[int] = []
        self.step_id = 0

    def plan(self) -> tuple[step_pb2.StepPlan, list[ToySequence]]:
        """The plan, and whose tokens its result brings, in order."""
        self.step_id += 1
        message = plan(self.step_id)
        if self.running and self.rng.random() < 0.1:
            self._leave(self.running.pop(), back=True)
        message.release = ints(*self.released)
        self.released.clear()
        budget = self.shape.max_num_batched_tokens - len(self.running)
        grow, prefill = [], []
        for sequence in self.running:
            remaining = len(sequence.tokens) - sequence.computed
            count = remaining
            if remaining > 1 or self.rng.random() < 0.2:
                count = self.rng.randint(0, min(remaining, budget + 1))
                prefill.append((sequence.row, count))
                budget -= max(0, count - 1)
            grow += [(sequence.row, block) for block in self._extend(sequence, count)]
            sequence.computed += count
        while self.waiting and self.rows and budget > 0:
            count, sequence = self._seat(message, budget)
            prefill.append((sequence.row, count))
            budget -= count
        message.grow = ints(*(n for pair in _mixed(self.rng, grow) for n in pair))
        message.prefill = ints(*(n for pair in sorted(prefill) for n in pair))
        computed = dict(prefill)
        sampled = [s for s in self.running if s.computed == len(s.tokens) and computed.get(s.row, 1) > 0]
        return message, sorted(sampled, key=lambda s: s.row)

    def commit(self, sampled: list[ToySequence], token_ids: list[int]) -> None:
        assert len(sampled) == len(token_ids)
        for sequence, token in zip(sampled, token_ids, strict=True):
            sequence.tokens.append(token)
            if len(sequence.tokens) - sequence.num_prompt == sequence.want:
                self.running.remove(sequence)
                self._leave(sequence, back=False)

    def digest(self) -> tuple[int, int]:
        return len(self.running), sum(s.computed for s in self.running)

    def _seat(self, message: step_pb2.StepPlan, budget: int) -> tuple[int, ToySequence]:
        sequence = self.waiting.pop(0)
        sequence.row = self.rows.pop(self.rng.randrange(len(self.rows)))
        count = self.rng.randint(1, min(len(sequence.tokens), budget))
        blocks = self._extend(sequence, count)
        seat = admit(sequence.row, sequence.tokens, blocks, num_prompt_tokens=sequence.num_prompt)
        seat.sampling.CopyFrom(sequence.sampling)
        message.admit.append(seat)
        sequence.computed = count
        self.running.append(sequence)
        return count, sequence

    def _extend(self, sequence: ToySequence, count: int) -> list[int]:
        needed = -(-(sequence.computed + count) // self.shape.block_size) - len(sequence.blocks)
        new = [self.free.pop() for _ in range(max(0, needed))]
        sequence.blocks += new
        return new

    def _leave(self, sequence: ToySequence, back: bool) -> None:
        assert sequence.row is not None
        self.released.append(sequence.row)
        self.rows.append(sequence.row)
        self.free += sequence.blocks
        self.rng.shuffle(self.free)
        sequence.blocks, sequence.row, sequence.computed = [], None, 0
        if back:
            self.waiting.append(sequence)


def _mixed(rng: random.Random, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Rows mixed at random, the blocks of one row in their order."""
    queues: dict[int, list[int]] = {}
    for row, block in pairs:
        queues.setdefault(row, []).append(block)
    rows = [row for row, _ in pairs]
    rng.shuffle(rows)
    return [(row, queues[row].pop(0)) for row in rows]

"""The backend without a model: the next token is a hash of the token ids found THROUGH the block table.

For load tests, capacity planning and exact tests of the scheduler: a wrong block, slot, position or length changes the
tokens, or is caught at once, because every slot remembers the token and the position that was stored in it.

    context = sum over positions p of (token_p + 1) * FACTOR^(p + 1)      mod 2^64
    token   = mix64(context) mod vocab_size                               greedy
    token   = mix64(context ^ draw_key(seed, choice, position)) mod vocab_size      temperature > 0

allowed_token_ids, min_tokens, bad words and constraints are obeyed (a forbidden token moves on to the next id); top-k,
top-p, min-p, penalties and biases change nothing. Logprobs are invented: the drawn token has 0, the j-th after it (mod
vocab_size) has -j; a prompt's tokens are scored in the same way.
`next_token` says the same in plain words, for tests.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from executor_svc.backends.base import AtOnce, StepOutput
from executor_svc.backends.injected_fault import InjectedFault
from executor_svc.batch import ForwardBatch
from executor_svc.errors import ComputeFault, RowFault
from executor_svc.masks import permitted
from executor_svc.noise import draw_key, mix64
from executor_svc.sampling import NO_LOGPROBS, History, SamplingBatch
from executor_svc.scoring import Scoring, messages
from protos.stepwire.wire.v1 import step_pb2

FACTOR = 0x9E3779B97F4A7C55  # odd, so that no power of it vanishes
SLOT_BYTES = 12  # a token and its position
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a simulated step takes: all in microseconds."""

    step_us: float = 0.0
    token_us: float = 0.0  # per token computed
    kv_us: float = 0.0  # per token read from the KV cache

    def seconds(self, batch: ForwardBatch) -> float:
        kv_tokens = int(batch.seq_lens.sum(dtype=np.int64))
        return (self.step_us + self.token_us * batch.num_tokens + self.kv_us * kv_tokens) / 1e6


def context_hash(token_ids: np.ndarray) -> int:
    total = 0
    for token in reversed(token_ids.tolist()):
        total = (total + token + 1) * FACTOR & _MASK_64
    return total


def next_token(
    token_ids: np.ndarray, vocab_size: int, sampling: step_pb2.Sampling | None = None, position: int = 0
) -> int:
    """What the backend draws after token_ids; position counts the output tokens before this one. No token sets."""
    context = context_hash(token_ids)
    if sampling is not None and sampling.temperature > 0:
        context ^= draw_key(sampling.seed, sampling.choice, position)
    return mix64(context) % vocab_size


class SimulatedBackend(AtOnce):
    name = "simulated"
    device = "none"

    def __init__(
        self,
        geometry: step_pb2.Geometry,
        identity: step_pb2.ModelIdentity,
        step_time: StepTime | None = None,
        fault: InjectedFault | None = None,
    ):
        self.geometry = geometry
        self.identity = identity
        self._step_time = step_time or StepTime()
        self._fault = fault
        shape = (geometry.num_blocks, geometry.block_size)
        self._tokens = np.zeros(shape, np.uint64)  # id + 1
        self._positions = np.full(shape, -1, np.int32)
        # Of each position, in the shape of a block table's blocks: itself, and FACTOR^(position + 1), wrapping.
        num_positions = -(-(geometry.max_model_len + 1) // geometry.block_size) * geometry.block_size
        self._place = np.arange(num_positions, dtype=np.int32).reshape(-1, geometry.block_size)
        powers = np.full(num_positions, FACTOR, np.uint64)
        self._powers = np.multiply.accumulate(powers).reshape(self._place.shape)

    def reset(self) -> None:
        self._positions.fill(-1)

    def copy_blocks(self, pairs: np.ndarray) -> None:
        sources, destinations = pairs[:, 0], pairs[:, 1]
        self._tokens[destinations] = self._tokens[sources]
        self._positions[destinations] = self._positions[sources]

    def run(self, batch: ForwardBatch) -> StepOutput:
        started = time.perf_counter()
        if self._fault is not None:
            self._fault.strike(batch.token_ids)
        self._tokens.reshape(-1)[batch.slot_mapping] = batch.token_ids.astype(np.uint64) + np.uint64(1)
        self._positions.reshape(-1)[batch.slot_mapping] = batch.positions
        contexts = self._contexts(batch.block_tables[batch.sampled], batch.seq_lens[batch.sampled])
        output = _draw(contexts, batch.sampling, self.geometry.vocab_size)
        if batch.scoring is not None:
            output = replace(output, prompt_logprobs=_invented_scores(batch.scoring, self.geometry.vocab_size))
        remaining = started + self._step_time.seconds(batch) - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return output

    def _contexts(self, block_tables: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """uint64 [S]: the hash of each row's first seq_len tokens, read through its block table [S, B]."""
        if not len(seq_lens):
            return np.empty(0, np.uint64)
        num_blocks = -(-seq_lens // self.geometry.block_size)
        # One entry per (row, block): its block id and its place in the sequence.
        first_entry = np.cumsum(num_blocks) - num_blocks
        owner = np.repeat(np.arange(len(seq_lens)), num_blocks)
        index = np.arange(len(owner)) - first_entry[owner]
        blocks = block_tables[owner, index]
        expected = self._place[index]
        terms = self._tokens[blocks] * self._powers[index]
        right = self._positions[blocks] == expected
        # Only a row's last block may be partly filled.
        last = first_entry + num_blocks - 1
        unused = expected[last] >= seq_lens[:, None]
        terms[last] = np.where(unused, np.uint64(0), terms[last])
        right[last] |= unused
        if not right.all():
            raise ComputeFault("a row reads a slot that does not hold its token: its block table is wrong")
        return np.add.reduceat(terms.sum(axis=1, dtype=np.uint64), first_entry)


def _draw(contexts: np.ndarray, sampling: SamplingBatch, vocab_size: int) -> StepOutput:
    parameters = sampling.parameters
    words = contexts.copy()
    for index in np.flatnonzero(parameters["temperature"] > 0).tolist():
        seed, choice = int(parameters["seed"][index]), int(parameters["choice"][index])
        words[index] ^= np.uint64(draw_key(seed, choice, int(sampling.positions[index])))
    words = _mix64(words)
    token_ids = (words % np.uint64(vocab_size)).astype(np.int32)
    faults = []
    for history in sampling.histories:
        index = history.index
        min_tokens = int(parameters["min_tokens"][index])
        try:
            token_ids[index] = _permitted(int(words[index]), history, min_tokens, vocab_size)
        except RowFault as fault:
            faults.append(step_pb2.RowFault(row=int(sampling.rows[index]), message=str(fault)))
    logprobs = [
        _invented_logprobs(int(sampling.rows[index]), int(token_ids[index]), count, vocab_size)
        for index, count in enumerate(parameters["logprobs"].tolist())
        if count != NO_LOGPROBS
    ]
    return StepOutput(token_ids, logprobs, faults=faults)


def _mix64(words: np.ndarray) -> np.ndarray:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _permitted(word: int, history: History, min_tokens: int, vocab_size: int) -> int:
    if history.has_changing_mask:
        ids = np.flatnonzero(permitted(history, min_tokens, vocab_size))
        return int(ids[np.searchsorted(ids, word % vocab_size) % len(ids)])
    allowed = history.sets.allowed
    barred = set(history.sets.stop.tolist()) if len(history.output) < min_tokens else set()
    count = len(allowed) or vocab_size
    for step in range(count):
        place = (word + step) % count
        token = int(allowed[place]) if len(allowed) else place
        if token not in barred:
            return token
    return token  # everything allowed is barred: the allowed set wins


def _invented_scores(scoring: Scoring, vocab_size: int) -> list[step_pb2.PromptLogprobs]:
    steps = np.arange(min(int(scoring.counts.max()), vocab_size))
    zeros = np.zeros(len(scoring.targets))
    top_ids = (scoring.targets[:, None] + steps) % vocab_size
    return list(messages(scoring, zeros, zeros + 1, top_ids, np.broadcast_to(-steps, top_ids.shape)))


def _invented_logprobs(row: int, token: int, count: int, vocab_size: int) -> step_pb2.RowLogprobs:
    steps = np.arange(min(count, vocab_size))
    return step_pb2.RowLogprobs(
        row=row,
        logprob=0.0,
        rank=1,
        top_token_ids=((token + steps) % vocab_size).astype("<i4").tobytes(),
        top_logprobs=(-steps).astype("<f4").tobytes(),
    )

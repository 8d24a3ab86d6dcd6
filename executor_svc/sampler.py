"""Logits -> one token per row, and logprobs for those who asked. numpy on the host; knows no device, plan or row table.

    logits ─ bias ─ penalties ─ masks ─ / temperature ─ min-p ─ top-k ─ top-p ─ race ─ token
       └── logprobs: of the unmodified distribution

Greedy rows stop after the masks: the largest logit wins, the lowest id among equals. Every other draw is an
exponential race: token i with weight exp(z_i) arrives at time e_i / exp(z_i), and the first one wins; e_i is noise.py's
number for (seed, choice, position, i). So a draw depends on nothing but its own row's logits, and narrowing the
candidates changes the winner only when it removes it.

Ties: top-k keeps exactly k and top-p the shortest sufficient prefix, both preferring lower ids among equals.
"""

from collections.abc import Callable

import numpy as np

from executor_svc.backends.base import StepOutput
from executor_svc.errors import NotFinite, RowFault
from executor_svc.masks import NOTHING_LEFT, permitted
from executor_svc.noise import NoiseSource, draw_key, exponential
from executor_svc.race import Race
from executor_svc.sampling import NO_LOGPROBS, History, SamplingBatch
from executor_svc.scoring import Scoring, messages
from protos.stepwire.wire.v1 import step_pb2

_LARGEST = np.finfo(np.float32).max


class Sampler:
    def __init__(self, vocab_size: int, race: Race | None = None):
        """race: draws the same unfiltered tokens, faster."""
        self._vocab_size = vocab_size
        self._race = race
        self._noise = NoiseSource(vocab_size)
        self._z = np.empty(vocab_size, np.float32)
        self._reach = np.empty(vocab_size, np.float32)
        self._arrival = np.empty(vocab_size, np.float32)

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> StepOutput:
        """logits: float32 [S, vocab_size], in the order of the batch; left as they are."""
        token_ids = logits.argmax(axis=1)
        largest = np.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
        if not np.isfinite(largest).all():  # argmax finds not-a-number first
            raise NotFinite("the model's logits are not finite")
        token_ids = token_ids.astype(np.int32)
        parameters = batch.parameters
        adjusted: dict[int, np.ndarray] = {}
        faults: dict[int, RowFault] = {}
        for history in batch.histories:
            index = history.index
            try:
                adjusted[index] = row = adjust(logits[index], history, parameters[index])
            except RowFault as fault:
                faults[index] = fault
            else:
                token_ids[index] = row.argmax()
        drawing = np.flatnonzero(parameters["temperature"] > 0)
        drawing = drawing[[index not in faults for index in drawing.tolist()]] if faults else drawing
        if self._race is not None:
            drawing = self._draw_unfiltered(self._race, logits, adjusted, batch, drawing, token_ids)
        for index in drawing.tolist():
            row = adjusted[index] if index in adjusted else logits[index]
            token_ids[index] = self._draw(row, parameters[index], int(token_ids[index]), int(batch.positions[index]))
        logprobs = [
            row_logprobs(logits[index], int(token_ids[index]), count, int(batch.rows[index]))
            for index, count in enumerate(parameters["logprobs"].tolist())
            if count != NO_LOGPROBS
        ]
        told = [step_pb2.RowFault(row=int(batch.rows[index]), message=str(fault)) for index, fault in faults.items()]
        return StepOutput(token_ids, logprobs, faults=told)

    def _draw_unfiltered(
        self,
        race: Race,
        logits: np.ndarray,
        adjusted: dict[int, np.ndarray],
        batch: SamplingBatch,
        drawing: np.ndarray,
        token_ids: np.ndarray,
    ) -> np.ndarray:
        """Replaces the most likely tokens of rows without filters by those they draw; returns the other rows."""
        asked = batch.parameters[drawing]
        is_free = (asked["min_p"] == 0) & (asked["top_p"] == 1)
        is_free &= (asked["top_k"] == 0) | (asked["top_k"] >= self._vocab_size)
        free = drawing[is_free]
        if len(free):
            keys = [
                draw_key(int(one["seed"]), int(one["choice"]), position)
                for one, position in zip(asked[is_free], batch.positions[free].tolist(), strict=True)
            ]
            rows = [np.ascontiguousarray(adjusted.get(index, logits[index])) for index in free.tolist()]
            token_ids[free] = race.draw(rows, token_ids[free], asked["temperature"][is_free], np.array(keys, np.uint64))
        return drawing[~is_free]

    def _draw(self, logits: np.ndarray, parameters: np.void, best: int, position: int) -> int:
        """`best` is a token with the largest logit."""
        key = draw_key(int(parameters["seed"]), int(parameters["choice"]), position)
        z = self._z
        np.subtract(logits, logits[best], out=z)
        if parameters["temperature"] != 1:
            with np.errstate(over="ignore"):
                np.divide(z, parameters["temperature"], out=z)
        candidates = keep(z, float(parameters["min_p"]), int(parameters["top_k"]), float(parameters["top_p"]))
        if candidates is None:
            candidates, bits = self._contenders(z, key, best)
        else:
            bits = self._noise.bits_of(key, candidates)
        # Logarithms of the arrival times: nothing overflows, equal weights stay equal.
        return int(candidates[np.argmin(np.log(exponential(bits)) - z[candidates])])

    def _contenders(self, z: np.ndarray, key: int, best: int) -> tuple[np.ndarray, np.ndarray]:
        """Every token that may arrive before `best` does, and it: (ids, bits).

        e_i / exp(z_i) <= e_best is what it takes, and bits_i / 2^32 <= e_i always holds; so a cheap test in float32
        with a margin for its rounding loses no winner, and the exact race is run by a few tokens instead of all.
        """
        bits = self._noise.all_bits(key)
        limit = float(exponential(bits[best : best + 1])[0]) * 2.0**32 * (1 + 1e-5)
        np.exp(z, out=self._reach)
        np.multiply(self._reach, np.float32(limit), out=self._reach)
        np.copyto(self._arrival, bits, casting="unsafe")
        contenders = np.flatnonzero(self._arrival <= self._reach)
        return contenders, bits[contenders]


def adjust(logits: np.ndarray, history: History, parameters: np.void) -> np.ndarray:
    """A copy with this row's bias, penalties and masks. Raises RowFault when they leave nothing to draw."""
    row, sets = logits.copy(), history.sets
    row[sets.bias_ids] += sets.bias_values
    repetition = parameters["repetition"]
    if repetition != 1:
        seen = np.zeros(len(row), bool)
        seen[history.prompt] = seen[history.output] = True
        ids = np.flatnonzero(seen)
        with np.errstate(over="ignore"):
            scaled = np.where(row[ids] > 0, row[ids] / repetition, row[ids] * repetition)
        row[ids] = np.minimum(scaled, _LARGEST)
    if parameters["presence"] or parameters["frequency"]:
        ids, counts = np.unique(history.output, return_counts=True)
        row[ids] -= parameters["presence"] + parameters["frequency"] * counts.astype(np.float32)
    if history.has_changing_mask or len(sets.allowed) or len(history.output) < parameters["min_tokens"]:
        row[~permitted(history, int(parameters["min_tokens"]), len(row))] = -np.inf
        if row.max() == -np.inf:
            raise RowFault(NOTHING_LEFT)
    return row


def keep(z: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray | None:
    """Ids, ascending, that the three filters leave; None when all are off. z: log weights, the largest is 0."""
    ids = None
    if min_p > 0:
        ids = np.flatnonzero(z >= np.log(min_p))
    if 0 < top_k < (len(z) if ids is None else len(ids)):
        ids = _narrow(z, ids, lambda values: _largest(values, top_k))
    if top_p < 1:
        ids = _narrow(z, ids, lambda values: _nucleus(values, top_p))
    return ids


def _narrow(z: np.ndarray, ids: np.ndarray | None, choose: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Those of `ids` (None: all) whose places `choose` returns."""
    return choose(z) if ids is None else ids[choose(z[ids])]


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """Places, ascending, of the k largest values, k >= 1; among those equal to the k-th, the first ones."""
    kth = np.partition(values, len(values) - k)[len(values) - k]
    return _at_least(values, kth, k)


def _nucleus(values: np.ndarray, p: float) -> np.ndarray:
    """Places, ascending, of the largest values that together have a share p of the weight."""
    weights = np.exp(values)
    wanted = p * weights.sum(dtype=np.float64)
    # Look only at a head of the distribution that is sure to hold them.
    for floor in (1e-2, 1e-4, 1e-6, 0.0):
        head = np.flatnonzero(weights >= floor)
        if weights[head].sum(dtype=np.float64) >= wanted:
            break
    descending = np.sort(values[head])[::-1]
    mass = np.cumsum(np.exp(descending), dtype=np.float64)
    count = min(int(np.searchsorted(mass, wanted)) + 1, len(head))
    return head[_at_least(values[head], descending[count - 1], count)]


def _at_least(values: np.ndarray, kth: np.float32, k: int) -> np.ndarray:
    """Places of the k largest values, `kth` being the k-th largest."""
    places = np.flatnonzero(values >= kth)
    if len(places) > k:
        equal = np.flatnonzero(values[places] == kth)
        places = np.delete(places, equal[k - len(places) :])
    return places


def most_likely(logits: np.ndarray, count: int) -> np.ndarray:
    """The `count` most likely ids, most likely first, lower ones first among equals."""
    top = _largest(logits, count) if count else np.empty(0, np.int64)
    return top[np.argsort(-logits[top], kind="stable")]


def row_logprobs(logits: np.ndarray, token: int, num_top: int, row: int) -> step_pb2.RowLogprobs:
    """Of the drawn token and of the num_top most likely ones; minus infinity stays what it is."""
    largest = logits.max()
    log_total = float(largest) + np.log(np.exp(logits - largest).sum(dtype=np.float64))
    top = most_likely(logits, min(num_top, len(logits)))
    return step_pb2.RowLogprobs(
        row=row,
        logprob=float(logits[token]) - log_total,
        rank=int(np.count_nonzero(logits > logits[token])) + 1,
        top_token_ids=top.astype("<i4").tobytes(),
        top_logprobs=(logits[top].astype(np.float64) - log_total).astype("<f4").tobytes(),
    )


def score(logits: np.ndarray, scoring: Scoring) -> list[step_pb2.PromptLogprobs]:
    """logits: float32 [P, vocab_size] of the scored tokens. Raises NotFinite."""
    largest = logits.max(axis=1)
    if not np.isfinite(largest).all():
        raise NotFinite("the model's logits are not finite")
    log_total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64))
    drawn = logits[np.arange(len(logits)), scoring.targets]
    ranks = (logits > drawn[:, None]).sum(axis=1) + 1
    width = min(int(scoring.counts.max()), logits.shape[1])
    top_ids = np.empty((len(logits), width), np.int64)
    for ids, row in zip(top_ids, logits, strict=True):
        ids[:] = most_likely(row, width)
    top = np.take_along_axis(logits, top_ids, axis=1) - log_total[:, None]
    return list(messages(scoring, drawn - log_total, ranks, top_ids, top))

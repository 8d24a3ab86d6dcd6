"""The committer: reads the result of the oldest step in flight and appends its tokens.

Knows how tokens find their sequences. A token whose row has changed hands since is dropped, unless the sequence only
waits for it: FINISHING.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import scored_chunks
from scheduler_svc.core.contract import Output
from scheduler_svc.core.epoch import Epoch, Step
from scheduler_svc.core.rows import Roster
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import EndReason, ProtocolViolation

I4, U4 = np.dtype("<i4"), np.dtype("<u4")
TRUE = b"\x01"


@dataclass(slots=True)
class Committed:
    output: Output
    step: Step
    stopped: list[tuple[Sequence, int]] = field(default_factory=list)
    # Those that could draw nothing, and why.
    faulted: list[tuple[Sequence, str]] = field(default_factory=list)


class StopFilter:
    """Which tokens can be anybody's stop: one array lookup a step, then exact questions about the few that can."""

    def __init__(self, vocab_size: int):
        self._num_uses = Counter[int]()
        self._is_stop = np.zeros(vocab_size, np.bool_)

    def add(self, token_ids: frozenset[int], count: int) -> None:
        for token_id in token_ids:
            self._num_uses[token_id] += count
            self._is_stop[token_id] = self._num_uses[token_id] > 0

    def candidates(self, tokens: np.ndarray) -> list[int]:
        """Places of tokens that can be. Raises IndexError for a token outside the vocabulary."""
        can_be = self._is_stop.take(tokens.view(U4))
        return can_be.nonzero()[0].tolist() if TRUE in can_be.tobytes() else []


def commit(epoch: Epoch, result: step_pb2.StepResult, stops: StopFilter) -> Committed:
    """Raises ProtocolViolation, having changed nothing, if the result is not what the plan asked for."""
    step = _checked(epoch, result)
    tokens = np.frombuffer(result.token_ids, I4)
    try:
        candidates = stops.candidates(tokens)
    except IndexError:
        raise ProtocolViolation(f"step {step.step_id} drew a token outside the vocabulary") from None
    epoch.in_flight.popleft()
    rows, roster = epoch.rows, step.roster
    rows.commit(step.step_id, roster, tokens)
    output = Output(roster.session, roster.handle, tokens, roster.first + step.step_id)
    committed = Committed(output, step)
    heard: np.ndarray | None = None
    if roster.num_unseated != rows.num_unseated or roster.unheard:
        heard = _heard(epoch, roster, tokens)
        output.session, output.handle = output.session[heard], output.handle[heard]
        output.token, output.position = tokens[heard], output.position[heard]
    for i in candidates:
        if heard is None or heard[i]:
            sequence = _drawer(epoch, roster, i)
            if sequence.is_stop(int(tokens[i]), int(roster.first[i]) + step.step_id + 1):
                committed.stopped.append((sequence, int(tokens[i])))
    if result.logprobs or result.faults:
        answered = roster.rows if heard is None else roster.rows[heard]
        entries = {row: i for i, row in enumerate(answered.tolist())}
        output.logprobs = [(entries[lp.row], lp) for lp in result.logprobs if lp.row in entries]
    if result.faults:
        _commit_faults(epoch, committed, result, entries)
    _commit_scores(output, step, result)
    return committed


def _heard(epoch: Epoch, roster: Roster, tokens: np.ndarray) -> np.ndarray:
    """bool [n]: which answers count. Appends those of FINISHING sequences to their logs, which no row does for them."""
    heard = (epoch.rows.seat[roster.rows] == roster.seats) & (roster.seats > 0)
    if epoch.finishing:
        for i in (~heard).nonzero()[0].tolist():
            sequence = epoch.finishing.get(int(roster.seats[i]))
            if sequence is not None and sequence.request.max_tokens:
                sequence.log += tokens[i : i + 1].tobytes()
                heard[i] = True
    return heard


def _commit_faults(epoch: Epoch, committed: Committed, result: step_pb2.StepResult, entries: dict[int, int]) -> None:
    """Takes back what rows that could draw nothing seem to have drawn. `entries`: row -> entry of the output."""
    output, roster = committed.output, committed.step.roster
    where = {row: i for i, row in enumerate(roster.rows.tolist())}
    keep = np.ones(len(output.token), bool)
    for fault in result.faults:
        if fault.row not in entries:
            continue  # it was left meanwhile
        keep[entries[fault.row]] = False
        committed.faulted.append((_drawer(epoch, roster, where[fault.row]), fault.message))
    committed.stopped = [entry for entry in committed.stopped if all(entry[0] is not s for s, _ in committed.faulted)]
    places = np.cumsum(keep) - 1
    output.session, output.handle = output.session[keep], output.handle[keep]
    output.token, output.position = output.token[keep], output.position[keep]
    output.logprobs = [(int(places[entry]), values) for entry, values in output.logprobs if keep[entry]]


def _commit_scores(output: Output, step: Step, result: step_pb2.StepResult) -> None:
    """Prompt logprobs count whatever became of the row, as long as somebody wants the request."""
    if not result.prompt_logprobs:
        return
    sequences = {chunk.row: chunk.sequence for chunk in step.scored}
    for values in result.prompt_logprobs:
        sequence = sequences[values.row]
        if not sequence.state_of_request.sequences:
            continue
        fresh = sequence.state_of_request.scores.take(values)
        if fresh is not None:
            output.prompt_logprobs.append((sequence.request.session, sequence.handle, fresh))


def _drawer(epoch: Epoch, roster: Roster, i: int) -> Sequence:
    """Whose answer it is, of one that counts."""
    finishing = epoch.finishing.get(int(roster.seats[i]))
    return finishing if finishing is not None else epoch.rows.seated(roster.rows[i])


def _checked(epoch: Epoch, result: step_pb2.StepResult) -> Step:
    """The step that this is the result of. Its tokens are not looked at."""
    if (result.boot_id, result.epoch) != (epoch.boot_id, epoch.number):
        raise ProtocolViolation(f"a result of epoch {result.epoch}, this is {epoch.number}")
    if not epoch.in_flight:
        raise ProtocolViolation(f"a result of step {result.step_id}, none is in flight")
    step = epoch.in_flight[0]
    if result.step_id != step.step_id:
        raise ProtocolViolation(f"a result of step {result.step_id}, {step.step_id} is next")
    if (result.num_rows, result.num_stored_tokens) != (step.num_rows, step.num_stored):
        raise ProtocolViolation(
            f"step {step.step_id} left {result.num_rows} rows and {result.num_stored_tokens} tokens, "
            f"planned were {step.num_rows} and {step.num_stored}",
            EndReason.DIGEST,
        )
    if len(result.token_ids) != 4 * len(step.roster.rows):
        raise ProtocolViolation(
            f"step {step.step_id}: {len(result.token_ids)} bytes for {len(step.roster.rows)} tokens"
        )
    if step.scored or result.prompt_logprobs:
        scored_chunks.check(result, step.scored)
    return step

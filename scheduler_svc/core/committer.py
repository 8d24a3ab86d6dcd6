"""The committer: reads the result of the oldest step in flight and appends its tokens.

Knows how tokens find their sequences. A token whose row has changed hands since is dropped, unless the sequence only
waits for it: FINISHING.
"""

from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import prompt_scores
from scheduler_svc.core.contract import Output
from scheduler_svc.core.epoch import Epoch, Step
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import EndReason, ProtocolViolation

I4, U4 = np.dtype("<i4"), np.dtype("<u4")


@dataclass(slots=True)
class Committed:
    output: Output
    step: Step
    stopped: list[tuple[Sequence, int]] = field(default_factory=list)
    # Those that could draw nothing, and why.
    faulted: list[tuple[Sequence, str]] = field(default_factory=list)
    # Rows of which a block became full.
    grown: np.ndarray | None = None


class StopFilter:
    """Which tokens can be anybody's stop: one array lookup a step, then exact questions about the few that can."""

    def __init__(self, vocab_size: int):
        self._num_uses = np.zeros(vocab_size, np.int32)

    def add(self, token_ids: frozenset[int], count: int) -> None:
        for token_id in token_ids:
            self._num_uses[token_id] += count

    def candidates(self, tokens: np.ndarray) -> list[int]:
        return self._num_uses[tokens].nonzero()[0].tolist()


def commit(epoch: Epoch, result: step_pb2.StepResult, stops: StopFilter) -> Committed:
    """Raises ProtocolViolation, having changed nothing, if the result is not what the plan asked for."""
    step, tokens = _checked(epoch, result)
    epoch.in_flight.popleft()
    rows, roster = epoch.rows, step.roster
    committed = Committed(Output(), step)

    if roster.num_unseated == rows.num_unseated and not roster.unheard:
        who, session, handle, num_prompt, mine = roster.where, roster.session, roster.handle, roster.num_prompt, tokens
        answered = roster.rows
        late: list[int] = []
    else:
        heard = (rows.seat[roster.rows] == roster.seats) & (roster.seats > 0)
        late = (~heard).nonzero()[0].tolist() if epoch.finishing else []
        who = answered = roster.rows[heard]
        mine = tokens[heard]
        session, handle, num_prompt = roster.session[heard], roster.handle[heard], roster.num_prompt[heard]

    positions = rows.append(who, mine) - num_prompt
    for i in stops.candidates(mine):
        sequence = rows.sequence[answered[i]]
        assert sequence is not None
        if sequence.is_stop(int(mine[i]), int(positions[i]) + 1):
            committed.stopped.append((sequence, int(mine[i])))
    full = rows.full_blocks()
    if len(full):
        committed.grown = full
        epoch.memory.publish_drawn(rows, full)

    output = committed.output
    output.session, output.handle, output.token, output.position = session, handle, mine, positions
    entries = _commit_late(epoch, committed, tokens, late)
    if result.logprobs or result.faults:
        entries.update({int(row): i for i, row in enumerate(answered)})
        output.logprobs = [(entries[lp.row], lp) for lp in result.logprobs if lp.row in entries]
    if result.faults:
        _commit_faults(epoch, committed, result, entries)
    _commit_scores(output, step, result)
    return committed


def _commit_faults(epoch: Epoch, committed: Committed, result: step_pb2.StepResult, entries: dict[int, int]) -> None:
    """Takes back what rows that could draw nothing seem to have drawn. `entries`: row -> entry of the output."""
    output = committed.output
    seats = dict(zip(committed.step.roster.rows.tolist(), committed.step.roster.seats.tolist(), strict=True))
    keep = np.ones(len(output.token), bool)
    for fault in result.faults:
        if fault.row not in entries:
            continue  # it was left meanwhile
        keep[entries[fault.row]] = False
        seated = epoch.rows.sequence[fault.row]
        is_seated = seated is not None and seated.seat == seats[fault.row]
        sequence = seated if is_seated else epoch.finishing[seats[fault.row]]
        assert sequence is not None
        committed.faulted.append((sequence, fault.message))
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


def _commit_late(epoch: Epoch, committed: Committed, tokens: np.ndarray, late: list[int]) -> dict[int, int]:
    """Tokens of rows that were left while the step was in flight. Returns row -> entry for those that count."""
    output, roster = committed.output, committed.step.roster
    sequences: list[Sequence] = []
    taken: list[int] = []
    for i in late:
        sequence = epoch.finishing.get(int(roster.seats[i]))
        if sequence is None or not sequence.request.max_tokens:
            continue
        token = int(tokens[i])
        sequence.log += tokens[i : i + 1].tobytes()
        if sequence.is_stop(token, sequence.num_output):
            committed.stopped.append((sequence, token))
        sequences.append(sequence)
        taken.append(i)
    if not taken:
        return {}
    first = len(output.token)
    output.session = np.append(output.session, roster.session[taken])
    output.handle = np.append(output.handle, roster.handle[taken])
    output.token = np.append(output.token, tokens[taken])
    positions = np.array([sequence.num_output - 1 for sequence in sequences], np.int32)
    output.position = np.append(output.position, positions)
    return {int(roster.rows[i]): first + n for n, i in enumerate(taken)}


def _checked(epoch: Epoch, result: step_pb2.StepResult) -> tuple[Step, np.ndarray]:
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
    tokens = np.frombuffer(result.token_ids, I4)
    if len(tokens) and tokens.view(U4).max() >= epoch.geometry.vocab_size:
        raise ProtocolViolation(f"step {step.step_id} drew a token outside the vocabulary")
    if step.scored or result.prompt_logprobs:
        prompt_scores.check(result, step.scored)
    return step, tokens

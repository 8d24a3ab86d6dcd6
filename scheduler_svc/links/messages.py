"""Wire messages to values of the core and back. Pure: no sockets, no clock.

Everything a frontend sends is checked here once more before it can become an index: a frontend is only as good as its
newest bug.
"""

from collections.abc import Iterator
from typing import cast

import numpy as np

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.core.contract import Delivered, Finished, Geometry, Output, Request, Started, Stats
from scheduler_svc.errors import InvalidArgument

MAX_CHOICES = 16
# Of tenant and cache salt.
MAX_NAME_BYTES = 256
# A frontend puts the tenant's name before the client's id.
MAX_REQUEST_ID_BYTES = 2 * MAX_NAME_BYTES
MAX_COUNT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH = 256, 512
MAX_GRAMMAR_BYTES = 4 * 2**20
SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))
# What executors can compute with; they end an epoch over anything else, and with it everybody's step.
_SAMPLING_BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (SMALLEST, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (SMALLEST, 10.0),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "min_tokens": (0, MAX_COUNT),
}


def request_from_submit(submit: session_pb2.Submit, session: int, now: float, vocab_size: int | None = None) -> Request:
    """The request in `submit`. `vocab_size` None: no executor has told it yet, the core checks again later."""
    _check_names(submit)
    _within("sampling.n", submit.num_choices, 1, MAX_CHOICES)
    _within("handle", submit.handle, 0, 2**64 - submit.num_choices)
    _within("stopping.max_tokens", submit.max_tokens, 0, MAX_COUNT)
    _within("stopping.min_tokens", submit.min_tokens, 0, MAX_COUNT)
    prompt = _token_ids(submit.prompt_token_ids, "prompt.token_ids", vocab_size)
    if not len(prompt):
        raise InvalidArgument("the prompt has no tokens", field="prompt")
    _check_sampling(submit.sampling, vocab_size)
    return Request(
        session=session,
        request_id=submit.request_id,
        handle=submit.handle,
        prompt=prompt,
        sampling=submit.sampling,
        max_tokens=submit.max_tokens,
        num_choices=submit.num_choices,
        min_tokens=submit.min_tokens,
        stop_token_ids=frozenset(_token_ids(submit.stop_token_ids, "stopping.stop_token_ids", vocab_size).tolist()),
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        deadline=now + submit.deadline_ms / 1000 if submit.deadline_ms else None,
        delivered=_delivered(submit, vocab_size),
        num_prompt_logprobs=min(submit.num_prompt_logprobs, len(prompt)),
    )


def _check_names(submit: session_pb2.Submit) -> None:
    _within("request_id", len(submit.request_id.encode()), 1, MAX_REQUEST_ID_BYTES, "bytes")
    _within("tenant", len(submit.tenant.encode()), 0, MAX_NAME_BYTES, "bytes")
    _within("cache_salt", len(submit.cache_salt), 0, MAX_NAME_BYTES, "bytes")


def _within(field: str, value: float, low: float, high: float, unit: str = "") -> None:
    """Written so that not-a-number is refused."""
    if not low <= value <= high:
        raise InvalidArgument(f"{field} is {f'{value} {unit}'.strip()}, allowed is {low:g} to {high:g}", field=field)


def _delivered(submit: session_pb2.Submit, vocab_size: int | None) -> tuple[Delivered, ...] | None:
    if not submit.delivered:
        return None
    if len(submit.delivered) != submit.num_choices:
        raise InvalidArgument(f"delivered has {len(submit.delivered)} entries for {submit.num_choices} choices")
    for choice in submit.delivered:
        _within("delivered.num_preemptions", choice.num_preemptions, 0, MAX_COUNT)
        _within("delivered.num_resumes", choice.num_resumes, 0, MAX_COUNT)
    return tuple(
        Delivered(
            token_ids=_token_ids(choice.token_ids, "delivered.token_ids", vocab_size),
            finished=choice.finished,
            num_preemptions=choice.num_preemptions,
            num_resumes=choice.num_resumes,
        )
        for choice in submit.delivered
    )


def _token_ids(data: bytes, field: str, vocab_size: int | None) -> np.ndarray:
    if len(data) % 4:
        raise InvalidArgument(f"{field} is {len(data)} bytes, not a whole number of int32", field=field)
    ids = np.frombuffer(data, "<i4")
    if len(ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            allowed = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
            raise InvalidArgument(f"{field} has {low if low < 0 else high}, allowed is {allowed}", field=field)
    return ids


def _check_sampling(sampling: step_pb2.Sampling, vocab_size: int | None) -> None:
    for name, (low, high) in _SAMPLING_BOUNDS.items():
        _within(f"sampling.{name}", getattr(sampling, name), low, high)
    _within("sampling.top_k", sampling.top_k, 0, MAX_COUNT if vocab_size is None else vocab_size)
    _token_ids(sampling.stop_token_ids, "stopping.stop_token_ids", vocab_size)
    _token_ids(sampling.allowed_token_ids, "sampling.allowed_token_ids", vocab_size)
    biased = _token_ids(sampling.bias_token_ids, "sampling.logit_bias", vocab_size)
    if len(np.unique(biased)) != len(biased):
        raise InvalidArgument("a token has two biases", field="sampling.logit_bias")
    if len(sampling.bias_values) != 4 * len(biased):
        raise InvalidArgument("bias_values and bias_token_ids differ in length", field="sampling.logit_bias")
    if not np.isfinite(np.frombuffer(sampling.bias_values, "<f4")).all():
        raise InvalidArgument("a bias is not finite", field="sampling.logit_bias")
    _check_bad_words(_bad_word_values(sampling.bad_words), vocab_size)
    if sampling.HasField("constraint"):
        _within("sampling.constraint", len(sampling.constraint.grammar.encode()), 1, MAX_GRAMMAR_BYTES, "bytes")
        if not len(_token_ids(sampling.constraint.end_token_ids, "sampling.constraint", vocab_size)):
            raise InvalidArgument("no token ends the constrained output", field="sampling.constraint")


def _bad_word_values(data: bytes) -> np.ndarray:
    if len(data) % 4:
        raise InvalidArgument(
            f"bad_words is {len(data)} bytes, not a whole number of int32", field="sampling.bad_words"
        )
    return np.frombuffer(data, "<i4")


def _check_bad_words(values: np.ndarray, vocab_size: int | None) -> None:
    """Sequences, each behind its length."""
    field = "sampling.bad_words"
    place = count = 0
    while place < len(values):
        length = int(values[place])
        count += 1
        _within(field, length, 1, min(MAX_BAD_WORD_LENGTH, len(values) - place - 1), "tokens")
        _token_ids(values[place + 1 : place + 1 + length].tobytes(), field, vocab_size)
        place += 1 + length
    _within(field, count, 0, MAX_BAD_WORDS, "sequences")


def is_empty(output: Output) -> bool:
    return not (len(output.token) or output.started or output.finished or output.prompt_logprobs)


def frames(output: Output) -> Iterator[tuple[int, bytes]]:
    """(session, serialised ToFrontend) for each session that `output` has something for.

    One session, the usual case, costs three copies of columns whatever the number of rows.
    """
    bodies: dict[int, session_pb2.TokenFrame] = {}
    entries: dict[int, np.ndarray] = {}
    for session in _sessions(output):
        mine = slice(None) if len(output.session) and (output.session == session).all() else output.session == session
        bodies[session] = session_pb2.TokenFrame(
            handles=output.handle[mine].astype("<u8", copy=False).tobytes(),
            token_ids=output.token[mine].astype("<i4", copy=False).tobytes(),
            positions=output.position[mine].astype("<i4", copy=False).tobytes(),
        )
        if output.logprobs and not isinstance(mine, slice):
            entries[session] = np.cumsum(mine) - 1  # index in the output -> index in this frame
    for entry, values in output.logprobs:
        session = int(output.session[entry])
        place = int(entries[session][entry]) if session in entries else entry
        bodies[session].logprobs.add(entry=place, values=values)
    for session, handle, scores in output.prompt_logprobs:
        bodies[session].prompt_logprobs.add(handle=handle, values=scores)
    for started in output.started:
        bodies[started.session].started.append(_started(started))
    for finished in output.finished:
        bodies[finished.session].finished.append(finished_to_wire(finished))
    for session, body in bodies.items():
        yield session, session_pb2.ToFrontend(tokens=body).SerializeToString()


def _sessions(output: Output) -> list[int]:
    column = output.session
    if len(column) and (column == column[0]).all():
        sessions = {int(column[0])}
    else:
        sessions = set(np.unique(column).tolist())
    sessions.update(session for session, _, _ in output.prompt_logprobs)
    sessions.update(started.session for started in output.started)
    sessions.update(finished.session for finished in output.finished)
    return sorted(sessions)


def _started(started: Started) -> session_pb2.Started:
    return session_pb2.Started(handle=started.handle, num_cached_tokens=started.num_cached_tokens)


def finished_to_wire(finished: Finished) -> session_pb2.Finished:
    return session_pb2.Finished(
        handle=finished.handle,
        cause=cast("session_pb2.FinishCause", int(finished.cause)),
        stop_token_id=finished.stop_token_id or 0,
        num_output_tokens=finished.num_output_tokens,
        num_cached_tokens=finished.num_cached_tokens,
        num_preemptions=finished.num_preemptions,
        num_resumes=finished.num_resumes,
        message=finished.message,
    )


def load_from_stats(stats: Stats, query_id: int, welcome: session_pb2.Welcome, num_frontends: int) -> session_pb2.Load:
    return session_pb2.Load(
        query_id=query_id,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        blocks_total=stats.blocks_total,
        blocks_owned=stats.blocks_owned,
        blocks_cached=stats.blocks_cached,
        generation_tokens_total=stats.generation_tokens_total,
        prompt_tokens_total=stats.prompt_tokens_total,
        prompt_tokens_cached_total=stats.prompt_tokens_cached_total,
        epoch=welcome.epoch,
        executor_ready=welcome.executor_ready,
        num_frontends=num_frontends,
    )


def num_planned_tokens(plan: step_pb2.StepPlan, num_running: int) -> int:
    """Tokens that a step computes: those of rows catching up, and one for every other live row."""
    counts = np.frombuffer(plan.prefill, "<i4")[1::2]
    return int(counts.sum()) + max(0, num_running - len(counts))


def geometry_fault(geometry: step_pb2.Geometry) -> str:
    """What is wrong with what an executor reports; empty: nothing."""
    for name in Geometry.__slots__:
        if getattr(geometry, name) < 1:
            return f"geometry.{name} is 0"
    if geometry.num_blocks * geometry.block_size >= 2**31:
        return f"geometry has {geometry.num_blocks} blocks of {geometry.block_size}: slots do not fit in int32"
    return ""

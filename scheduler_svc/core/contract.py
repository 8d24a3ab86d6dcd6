"""The values that cross the edge of the core: facts in, plans and outputs out.

This file knows nothing of queues, blocks or sockets. Times are seconds of whatever monotonic clock the caller uses; the
core never reads one. Token ids are int32 arrays.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from protos.stepwire.wire.v1 import session_pb2, step_pb2


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the executor measured and reported; counts of blocks, rows and tokens."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int

    @staticmethod
    def from_wire(message: step_pb2.Geometry) -> "Geometry":
        return Geometry(
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            max_num_seqs=message.max_num_seqs,
            max_model_len=message.max_model_len,
            max_num_batched_tokens=message.max_num_batched_tokens,
            vocab_size=message.vocab_size,
        )


class Policy(IntEnum):
    """Who is admitted first among those who wait."""

    FCFS = 0
    PRIORITY = 1
    FAIR = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows."""

    max_waiting: int = 1024
    max_waiting_tokens: int = 4_000_000
    # The same for each tenant, so that one cannot fill the queue alone. None: no bound of its own.
    max_waiting_per_tenant: int | None = None
    max_waiting_tokens_per_tenant: int | None = None
    # Requests that would wait longer than this for their turn are refused. None: the queue may be as long as the above.
    max_wait_s: float | None = None
    policy: Policy = Policy.FCFS
    pipeline_depth: int = 2
    prefix_caching: bool = True
    # Secret of this process: block hashes cannot be predicted, so nobody can plant a collision.
    hash_key: bytes = b"stepwire"
    # Share of the pool that admissions leave to the growth of what runs already.
    watermark: float = 0.01
    # Preempted so often, a sequence is admitted again only with its worst case reserved, and then stays.
    max_preemptions: int = 3
    # A request that was at work in so many deaths of executors, the last one alone, ends. From 3.
    max_executor_deaths: int = 4
    # Steps are kept short enough for running streams to see a token this often. None: as much as fits in a step.
    inter_token_target_s: float | None = None


@dataclass(slots=True)
class Request:
    """What a client asked, resolved: every number is within bounds and every default is filled in."""

    session: int  # which frontend; chosen by the service
    request_id: str
    handle: int  # the frontend's name for choice 0; choice i is handle + i
    prompt: np.ndarray  # int32 [num_prompt_tokens], at least one token
    sampling: step_pb2.Sampling  # as for choice 0; the core sets `choice`
    max_tokens: int
    num_choices: int = 1
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()  # end-of-sequence included unless it is ignored
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    deadline: float | None = None
    # Resuming after the loss of a scheduler: what each choice had delivered.
    delivered: "tuple[Delivered, ...] | None" = None
    # The same of its prompt's logprobs: how many, from the second token on.
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Delivered:
    token_ids: np.ndarray  # int32
    finished: bool = False
    num_preemptions: int = 0
    num_resumes: int = 0


class Cause(IntEnum):
    """Why a sequence ended; the numbers are the wire's FinishCause."""

    STOP = session_pb2.FINISH_CAUSE_STOP
    LENGTH = session_pb2.FINISH_CAUSE_LENGTH
    CANCELLED = session_pb2.FINISH_CAUSE_CANCELLED
    EXPIRED = session_pb2.FINISH_CAUSE_EXPIRED
    FAILED = session_pb2.FINISH_CAUSE_FAILED
    INVALID = session_pb2.FINISH_CAUSE_INVALID


@dataclass(frozen=True, slots=True)
class Started:
    session: int
    handle: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    session: int
    handle: int
    cause: Cause
    stop_token_id: int | None
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_resumes: int
    message: str = ""  # with FAILED and INVALID: why


# Shared by all outputs without tokens: nothing can be written into an empty array.
_NO_INTS = np.empty(0, np.int32)
_NO_HANDLES = np.empty(0, np.uint64)


@dataclass(slots=True)
class Output:
    """What happened since the last output, in columns: entry i is one committed token of one sequence."""

    session: np.ndarray = field(default_factory=lambda: _NO_INTS)
    handle: np.ndarray = field(default_factory=lambda: _NO_HANDLES)
    token: np.ndarray = field(default_factory=lambda: _NO_INTS)
    position: np.ndarray = field(default_factory=lambda: _NO_INTS)  # 0-based, in the sequence's output
    logprobs: list[tuple[int, step_pb2.RowLogprobs]] = field(default_factory=list)  # (entry, values)
    prompt_logprobs: list[tuple[int, int, step_pb2.PromptLogprobs]] = field(default_factory=list)  # (session, handle)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters only grow over the life of the scheduler; gauges are of now."""

    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_owned: int
    blocks_cached: int
    blocks_free: int
    generation_tokens_total: int
    prompt_tokens_total: int  # of admitted requests, once each
    prompt_tokens_cached_total: int
    prompt_tokens_computed_total: int
    preemptions_total: int
    recomputed_tokens_total: int

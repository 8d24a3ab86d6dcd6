"""A sequence: one token stream. A request asks for `num_choices` of them over one prompt.

This file knows what a sequence is, not when it runs. While a sequence is RUNNING its newest tokens and its counters
live in the columns of rows.py; `log` is brought up to date when it leaves its row. In every other
state the sequence is whole.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from scheduler_svc.core.contract import Geometry, Request
from scheduler_svc.core.prompt_scores import PromptScores
from scheduler_svc.core.story import Entry, Moment

STORY_LENGTH = 64


class State(Enum):
    """A sequence is in exactly one of these.

    WAITING -> RUNNING            admitted: owns a row and blocks
    RUNNING -> WAITING            preempted, or the executor was lost
    RUNNING -> FINISHING          its last step is planned: the row is gone, blocks stay until the result is here
    FINISHING -> WAITING          the executor was lost
    any -> FINISHED               the last token came, a stop id, a cancel, a deadline
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """What the sequences of one request share."""

    request: Request
    # Arrival order over the life of the scheduler.
    serial: int
    # Where this request's chain of block hashes begins: tenant and salt, keyed.
    root: np.ndarray
    arrived: float
    # Its prompt's logprobs.
    scores: PromptScores = field(default_factory=lambda: PromptScores(0, 0))
    # Those not finished.
    sequences: "list[Sequence]" = field(default_factory=list)
    started: bool = False
    # Deaths of executors it is accused of.
    num_deaths: int = 0
    # The last transitions of its sequences: (step_id, choice, what happened, numbers).
    story: deque[Entry] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))


@dataclass(slots=True, eq=False)
class Sequence:
    state_of_request: RequestState
    choice: int
    # Known tokens, int32 little-endian: the prompt, then the output committed so far.
    log: bytearray
    state: State = State.WAITING
    # Identifies this stay in the waiting queue; None: not in the queue (running, parked or ended).
    ticket: int | None = None
    # Those that wait until this running sequence has computed that many blocks, and then go on from them.
    followers: "list[tuple[int, Sequence]]" = field(default_factory=list)

    # The seat. Meaningful in RUNNING; `blocks` and `num_computed` also in FINISHING.
    row: int = 0
    seat: int = 0
    # While RUNNING those it was admitted with; what it grew by is in its row of the table.
    blocks: list[int] = field(default_factory=list)
    # Once it has settled, its row knows.
    num_computed: int = 0
    # Leading blocks offered to the prefix index.
    num_published: int = 0
    # Under this hash of its leading tokens a stream that grows can be found; see memory.py.
    found_under: bytes | None = None
    # The step in which it caught up with its known tokens, since which it decodes. None: still catching up.
    settled_step: int | None = None
    # The last step that computes a token of it. It is not admitted again before that step's result is here.
    fence: int = 0
    worst_blocks: int = 0
    protected: bool = False
    # Whether what it computes of its prompt is scored.
    is_scored: bool = False

    # Hashes of the full blocks of `log` and of all of it, made when needed; behind `log` after it has grown.
    keys: bytes = b""
    whole_key: bytes = b""
    num_hashed: int = 0

    # Output tokens its tenant was charged for, some of them in advance.
    num_charged: int = 0
    started: bool = False
    num_cached_tokens: int = 0
    # Tokens that were computed when it lost its seat: computing them again is waste.
    num_lost_tokens: int = 0
    num_preemptions: int = 0
    num_resumes: int = 0
    # Tokens that were, or were being, computed when its executor died; 0: it has passed that point since.
    died_at: int = 0

    @property
    def request(self) -> Request:
        return self.state_of_request.request

    @property
    def handle(self) -> int:
        return self.request.handle + self.choice

    @property
    def serial(self) -> int:
        return self.state_of_request.serial

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_logged(self) -> int:
        return len(self.log) >> 2

    @property
    def num_output(self) -> int:
        """Exact unless RUNNING."""
        return self.num_logged - self.num_prompt

    @property
    def num_skippable(self) -> int:
        """Leading tokens that need not be computed where their keys and values exist. The newest must: it is drawn
        after."""
        return min(self.num_logged - 1, self.state_of_request.scores.num_skippable)

    def tokens(self) -> np.ndarray:
        return np.frombuffer(bytes(self.log), "<i4")

    def limit(self, geometry: Geometry) -> int:
        """The number of tokens, prompt included, at which it ends."""
        return min(self.num_prompt + self.request.max_tokens, geometry.max_model_len)

    def is_stop(self, token: int, num_output: int) -> bool:
        """Whether `token`, as the `num_output`-th of the output, ends the stream."""
        return token in self.request.stop_token_ids and num_output >= self.request.min_tokens

    def tell(self, at: Moment, event: str, *numbers: int) -> None:
        self.state_of_request.story.append(Entry(at, self.choice, event, numbers))


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def worst_case_blocks(num_prompt: int, limit: int, block_size: int) -> int:
    """The most blocks it ever owns: the last token drawn is never computed, a prompt always is."""
    return blocks_for(max(limit - 1, num_prompt), block_size)

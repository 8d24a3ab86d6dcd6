"""The frontend's side of one request: tokens in, deltas out, and all that is needed to ask for the rest again.

Knows nothing of sockets. Its laws: a token is delivered once, at its position; what was delivered is kept until the
request ends, because only the frontend can tell a new scheduler where to go on.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import DeadlineExceeded, InvalidArgument, RequestError, RequestFailed

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ChoiceDelta:
    """What came for one choice since the last read."""

    index: int
    token_ids: list[int]
    # One entry a token when the request asked for them, else empty.
    logprobs: list[step_pb2.RowLogprobs]
    finished: session_pb2.Finished | None = None


class StreamOwner(Protocol):
    """The session, as a stream sees it."""

    def send_cancel(self, cancel: session_pb2.Cancel) -> None: ...

    def forget(self, stream: "RequestStream") -> None:
        """It is over: nothing more is delivered to it, and it is not resumed."""


@dataclass(slots=True)
class Choice:
    stream: "RequestStream"
    index: int
    # Every token so far; the first `num_read` of them were handed out.
    token_ids: list[int] = field(default_factory=list)
    num_read: int = 0
    logprobs: list[step_pb2.RowLogprobs] = field(default_factory=list)
    finished: session_pb2.Finished | None = None
    # Nothing more will come of it, and nothing more is wanted.
    is_over: bool = False

    def push(self, token_id: int, position: int, logprobs: step_pb2.RowLogprobs | None) -> None:
        expected = len(self.token_ids)
        if self.is_over or position < expected:
            return  # repeated: sent by the session before, and again since the resumption
        if position > expected:
            logger.error(
                "tokens_lost request_id=%r choice=%d expected=%d got=%d",
                *(self.stream.request_id, self.index, expected, position),
            )
            self.stream.fail(RequestFailed("tokens were lost between scheduler and frontend"), cancel=True)
            return
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def take(self) -> ChoiceDelta | None:
        if self.num_read == len(self.token_ids) and self.finished is None:
            return None
        delta = ChoiceDelta(self.index, self.token_ids[self.num_read :], self.logprobs, self.finished)
        self.num_read = len(self.token_ids)
        self.logprobs, self.finished = [], None
        return delta


class RequestStream:
    """One request's answer. Made by SchedulerSession.submit()."""

    def __init__(self, submit: session_pb2.Submit, owner: StreamOwner, now: float) -> None:
        self.submit = submit
        self.request_id = submit.request_id
        self.started: session_pb2.Started | None = None
        self.choices = [Choice(self, index) for index in range(submit.num_choices)]
        # Of the prompt's tokens from the second on, in order, until they are read; and how many came altogether.
        self.prompt_logprobs: list[step_pb2.PromptLogprobs] = []
        self.num_prompt_logprobs = 0
        # Times it was handed to another scheduler, or again to the same one.
        self.num_resumes = 0
        self.was_sent = False
        # Since when nobody works on it; None: somebody does.
        self.paused_at: float | None = None
        # The scheduler was asked to end it by its id.
        self.is_unwanted = False
        self.deadline = now + submit.deadline_ms / 1000 if submit.deadline_ms else None
        self._owner = owner
        self._error: RequestError | None = None
        self._num_open = len(self.choices)
        self._has_news = False  # since the last read
        # The reader's, while it waits.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return self._error is not None or not self._num_open

    async def read(self) -> list[ChoiceDelta]:
        """Waits for news and returns all of it; an empty list after the end. Raises RequestError when it failed.

        One reader at a time.
        """
        while True:
            if not (self._has_news or self.is_over):
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            self._has_news = False
            deltas = [delta for choice in self.choices if (delta := choice.take()) is not None]
            if deltas:
                return deltas
            if self._error is not None:
                raise self._error
            if self.is_over:
                return []

    def cancel(self) -> None:
        """Nobody wants the rest. Harmless when it is over already."""
        if self.is_over:
            return
        self._owner.send_cancel(session_pb2.Cancel(request_id=self.request_id))
        for choice in self.choices:
            if not choice.is_over:
                self.finish(choice, cancelled(choice))

    def cancel_choice(self, index: int) -> None:
        """A stop string matched: this choice is over, its reader knows more than we do."""
        choice = self.choices[index]
        if choice.is_over or self._error is not None:
            return
        self._owner.send_cancel(session_pb2.Cancel(handle=self.submit.handle + index))
        choice.num_read, choice.logprobs = len(choice.token_ids), []
        self._close(choice)

    def take_prompt_logprobs(self) -> list[step_pb2.PromptLogprobs]:
        """What came since the last call. All of it comes before the first delta that has tokens, or with it."""
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken

    # ---- what the session does ---------------------------------------------------------------------------------

    def push_prompt_logprobs(self, values: step_pb2.PromptLogprobs) -> None:
        """A part that begins elsewhere than where the last one ended was repeated, or something was lost."""
        count = len(values.logprobs) // 4
        if values.first_position + count - 1 <= self.num_prompt_logprobs:
            return
        if values.first_position != self.num_prompt_logprobs + 1:
            logger.error("prompt_logprobs_lost request_id=%r", self.request_id)
            self.fail(RequestFailed("prompt logprobs were lost between scheduler and frontend"), cancel=True)
            return
        self.num_prompt_logprobs += count
        self.prompt_logprobs.append(values)

    def wake(self) -> None:
        """Something changed: the reader looks, and the owner forgets what is over."""
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.is_over:
            self._owner.forget(self)

    def _close(self, choice: Choice) -> None:
        choice.is_over = True
        self._num_open -= 1
        self.wake()

    def finish(self, choice: Choice, finished: session_pb2.Finished) -> None:
        if choice.is_over or self._error is not None:
            return
        if finished.cause == session_pb2.FINISH_CAUSE_EXPIRED:
            self.fail(DeadlineExceeded("the deadline passed"))
        elif finished.cause == session_pb2.FINISH_CAUSE_FAILED:
            self.fail(RequestFailed(finished.message or "the request failed"))
        elif finished.cause == session_pb2.FINISH_CAUSE_INVALID:
            self.fail(InvalidArgument(finished.message or "the request cannot go on", field="sampling"), cancel=True)
        else:
            choice.finished = finished
            self._close(choice)

    def fail(self, error: RequestError, *, cancel: bool = False) -> None:
        if self.is_over:
            return
        self._error = error
        if cancel:
            self._owner.send_cancel(session_pb2.Cancel(request_id=self.request_id))
        self.wake()

    def pause(self, now: float) -> None:
        if self.paused_at is None:
            self.paused_at = now

    def lose(self, now: float) -> None:
        """The session is over. A cancel that was on its way may be lost with it, so it is ours to obey."""
        if self.is_unwanted:
            self.cancel()
        else:
            self.pause(now)

    def next_submit(self) -> session_pb2.Submit:
        """What to send to the scheduler now: the request, or the rest of it."""
        if not self.was_sent:
            self.was_sent = True
            return self.submit
        self.num_resumes += 1
        submit = session_pb2.Submit()
        submit.CopyFrom(self.submit)
        if self.deadline is not None:
            submit.deadline_ms = max(1, round((self.deadline - time.monotonic()) * 1000))
        submit.num_prompt_logprobs = self.num_prompt_logprobs
        for choice in self.choices:
            submit.delivered.add(
                token_ids=np.asarray(choice.token_ids, "<i4").tobytes(),
                finished=choice.is_over,
                num_resumes=self.num_resumes - 1,  # before this one, which the scheduler counts itself
            )
        return submit


def cancelled(choice: Choice) -> session_pb2.Finished:
    """The end of a choice that its own client cancelled: nobody waits for the scheduler's word."""
    started = choice.stream.started
    return session_pb2.Finished(
        handle=choice.stream.submit.handle + choice.index,
        cause=session_pb2.FINISH_CAUSE_CANCELLED,
        num_output_tokens=len(choice.token_ids),
        num_cached_tokens=started.num_cached_tokens if started is not None else 0,
        num_resumes=choice.stream.num_resumes,
    )

"""One request's answer: token deltas from the scheduler to messages for the client.

Ids and their logprobs go out with the first text that comes at or after them: a message is sent when there is text or
when the choice ends, and takes every id that has arrived. So none is empty, and ids wait only as long as nothing at all
can be shown: what is held back of their text (a cut character, the beginning of a stop string) may come in a later
message than they do. A reader who wants no text gets ids as they come. Knows nothing of gRPC beyond the message types.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.frontend.detokenizer import Detokenizer, TextStream
from scheduler_svc.frontend.stop import StopMatcher, StopSet
from scheduler_svc.frontend.submission import Resolved

LOWEST_LOGPROB = -9999.0
# Of one message: even with 20 candidates a token it stays far below the 4 MiB that clients take by default.
MAX_TOKENS_PER_MESSAGE = 2048

_REASON_OF_CAUSE = {
    session_pb2.FINISH_CAUSE_STOP: pb.FINISH_REASON_STOP,
    session_pb2.FINISH_CAUSE_LENGTH: pb.FINISH_REASON_LENGTH,
    session_pb2.FINISH_CAUSE_CANCELLED: pb.FINISH_REASON_CANCELLED,
}


@dataclass(slots=True)
class Delta:
    """What came for one choice; the session's ChoiceDelta has these fields."""

    index: int
    token_ids: list[int]
    logprobs: list[step_pb2.RowLogprobs] = field(default_factory=list)
    finished: session_pb2.Finished | None = None


class Generation:
    """All choices of one request."""

    def __init__(self, resolved: Resolved, detokenizer: Detokenizer):
        self._resolved = resolved
        self._is_first = True
        self._prompt_logprobs: list[pb.TokenLogprob] = []
        reads_text = resolved.text or bool(resolved.stops)
        stops = StopSet(resolved.stops) if resolved.stops else None
        self.choices = [
            ChoiceText(
                resolved,
                index,
                detokenizer.stream(resolved.prompt, skip_special_tokens=resolved.skip_special_tokens)
                if reads_text
                else None,
                StopMatcher(stops, include_stop=resolved.include_stop) if stops is not None else None,
            )
            for index in range(resolved.submit.num_choices)
        ]
        self._num_open = len(self.choices)

    @property
    def is_over(self) -> bool:
        return not self._num_open

    @property
    def finish_reason(self) -> "pb.FinishReason":
        """Of the choice that ended last; they end together or it does not matter."""
        return self.choices[-1].finish_reason

    def add_prompt_logprobs(self, parts: Sequence[step_pb2.PromptLogprobs]) -> None:
        """They are told before any output."""
        for part in parts:
            self._prompt_logprobs += prompt_token_logprobs(self._resolved.prompt, part)

    def messages(self, delta: Delta, cached_tokens: int) -> list[pb.GenerateResponse]:
        choice = self.choices[delta.index]
        if choice.is_over:
            return []
        messages = choice.messages(delta, cached_tokens)
        if choice.is_over:
            self._num_open -= 1
        if self._is_first or self._prompt_logprobs:
            return list(self._with_prompt(messages, delta, cached_tokens))
        return messages

    def _with_prompt(
        self, messages: Sequence[pb.GenerateResponse], delta: Delta, cached_tokens: int
    ) -> Iterator[pb.GenerateResponse]:
        for message in messages:
            while len(self._prompt_logprobs) > MAX_TOKENS_PER_MESSAGE:
                yield self._introduced(pb.GenerateResponse(index=delta.index), cached_tokens)
            yield self._introduced(message, cached_tokens)

    def _introduced(self, message: pb.GenerateResponse, cached_tokens: int) -> pb.GenerateResponse:
        """With what the first message says of the request, and as many prompt logprobs as fit."""
        if self._is_first:
            self._is_first = False
            message.request_id = self._resolved.request_id
            message.prompt.num_tokens = len(self._resolved.prompt)
            message.prompt.num_cached_tokens = cached_tokens
        if self._prompt_logprobs:
            message.prompt.logprobs.extend(self._prompt_logprobs[:MAX_TOKENS_PER_MESSAGE])
            del self._prompt_logprobs[:MAX_TOKENS_PER_MESSAGE]
        return message


class ChoiceText:
    """One choice: counts its tokens, turns them to text, finds its end."""

    def __init__(self, resolved: Resolved, index: int, stream: TextStream | None, matcher: StopMatcher | None):
        self._resolved = resolved
        self._index = index
        self._stream = stream
        self._matcher = matcher
        # What the next message will carry; a message is built once, because its fields are slow to append to.
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[pb.TokenLogprob] = []
        self.num_tokens = 0
        self.finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
        # The choice ended here, and the scheduler does not know.
        self.ended_by_text = False

    @property
    def is_over(self) -> bool:
        return self.finish_reason != pb.FINISH_REASON_UNSPECIFIED

    def messages(self, delta: Delta, cached_tokens: int) -> list[pb.GenerateResponse]:
        """What can be said once `delta` has come; the choice is open before it."""
        messages: list[pb.GenerateResponse] = []
        if self._can_add_together(delta):
            self._add_together(delta.token_ids)
        else:
            for token_id, logprobs in zip_longest(delta.token_ids, delta.logprobs):
                if len(self._token_ids) >= MAX_TOKENS_PER_MESSAGE:
                    messages.append(self._take())
                if self._add(token_id, logprobs):
                    self.ended_by_text = delta.finished is None
                    messages.append(self._finish(delta.finished, cached_tokens))
                    return messages
        if delta.finished is not None:
            messages.append(self._finish(delta.finished, cached_tokens))
        elif self._text or (not self._resolved.text and self._token_ids):
            messages.append(self._take())
        return messages

    def _can_add_together(self, delta: Delta) -> bool:
        """No token of these needs a look of its own."""
        return (
            self._matcher is None
            and not delta.logprobs
            and len(self._token_ids) + len(delta.token_ids) <= MAX_TOKENS_PER_MESSAGE
            and (self._stream is None or self._resolved.stop_token_ids.isdisjoint(delta.token_ids))
        )

    def _add_together(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        self._token_ids += token_ids
        if self._stream is not None:
            self._emit(self._stream.push_all(token_ids))

    def _add(self, token_id: int, logprobs: step_pb2.RowLogprobs | None) -> bool:
        """True when a stop string ended with this token."""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(token_logprob(token_id, logprobs))
        if self._stream is None or (self._is_stop_token(token_id) and not self._resolved.include_stop):
            return False
        return self._show(self._stream.push(token_id))

    def _is_stop_token(self, token_id: int) -> bool:
        return token_id in self._resolved.stop_token_ids and self.num_tokens >= self._resolved.min_tokens

    def _show(self, text: str) -> bool:
        if self._matcher is None:
            self._emit(text)
            return False
        least = self._resolved.min_tokens
        shown = self._matcher.feed(text, may_stop=self.num_tokens >= least, may_stop_next=self.num_tokens + 1 >= least)
        self._emit(shown)
        return self._matcher.matched is not None

    def _emit(self, text: str) -> None:
        if text and self._resolved.text:
            self._text.append(text)

    def _finish(self, finished: session_pb2.Finished | None, cached_tokens: int) -> pb.GenerateResponse:
        if self._stream is not None and (self._matcher is None or self._matcher.matched is None):
            matched = self._show(self._stream.flush())
            if self._matcher is not None and not matched:
                self._emit(self._matcher.flush())
        message = self._take()
        if self._matcher is not None and self._matcher.matched is not None:
            message.stop_string = self._matcher.matched
            message.finish_reason = pb.FINISH_REASON_STOP
        else:
            assert finished is not None
            self._describe_end(message, finished)
        self.finish_reason = message.finish_reason
        usage = message.usage
        usage.prompt_tokens = len(self._resolved.prompt)
        usage.cached_tokens = finished.num_cached_tokens if finished is not None else cached_tokens
        usage.completion_tokens = self.num_tokens
        if finished is not None:
            usage.num_preemptions = finished.num_preemptions
            usage.num_resumes = finished.num_resumes
        return message

    def _describe_end(self, message: pb.GenerateResponse, finished: session_pb2.Finished) -> None:
        message.finish_reason = _REASON_OF_CAUSE[finished.cause]
        if finished.cause != session_pb2.FINISH_CAUSE_STOP:
            return
        stop = self._resolved.stop_string_of_id.get(finished.stop_token_id)
        if stop is None:
            message.stop_token_id = finished.stop_token_id
            return
        message.stop_string = stop
        if self._resolved.include_stop and self._resolved.text and self._resolved.skip_special_tokens:
            message.text += stop  # as a token it has no text

    def _take(self) -> pb.GenerateResponse:
        message = pb.GenerateResponse(index=self._index, text="".join(self._text), token_ids=self._token_ids)
        self._text, self._token_ids = [], []
        if self._logprobs:
            message.logprobs.extend(self._logprobs)
            self._logprobs = []
        return message


def token_logprob(token_id: int, values: step_pb2.RowLogprobs) -> pb.TokenLogprob:
    top_ids = np.frombuffer(values.top_token_ids, "<i4").tolist()
    top_logprobs = np.frombuffer(values.top_logprobs, "<f4").tolist()
    return _token_logprob(token_id, values.logprob, values.rank, top_ids, top_logprobs)


def prompt_token_logprobs(prompt: Sequence[int], part: step_pb2.PromptLogprobs) -> Iterator[pb.TokenLogprob]:
    """One for each prompt token of `part`."""
    logprobs = np.frombuffer(part.logprobs, "<f4").tolist()
    ranks = np.frombuffer(part.ranks, "<i4").tolist()
    top_ids = np.frombuffer(part.top_token_ids, "<i4").reshape(len(ranks), part.num_top).tolist()
    top_logprobs = np.frombuffer(part.top_logprobs, "<f4").reshape(len(ranks), part.num_top).tolist()
    for i, values in enumerate(zip(logprobs, ranks, top_ids, top_logprobs, strict=True)):
        yield _token_logprob(int(prompt[part.first_position + i]), *values)


def _token_logprob(
    token_id: int, logprob: float, rank: int, top_ids: list[int], top_logprobs: list[float]
) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=token_id,
        logprob=max(logprob, LOWEST_LOGPROB),
        rank=rank,
        top=[
            pb.Candidate(token_id=i, logprob=max(value, LOWEST_LOGPROB))
            for i, value in zip(top_ids, top_logprobs, strict=True)
        ],
    )

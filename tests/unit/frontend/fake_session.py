"""A scheduler session without a scheduler: scripted tokens, the real session's manners.

Ends choices as the scheduler does (stop ids from min_tokens on, length, STOP before LENGTH), rejects live request ids,
and records what it was told. `gate` holds tokens back: clear it, and nothing moves until it is set.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.admin.v1 import admin_pb2
from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import AlreadyExists, RequestError, Unavailable
from scheduler_svc.links.block_feed import BlockFeed

Script = Callable[[session_pb2.Submit, int], Iterable[int]]


@dataclass
class Delta:
    index: int
    token_ids: list[int]
    logprobs: list[step_pb2.RowLogprobs] = field(default_factory=list)
    finished: session_pb2.Finished | None = None


class FakeStream:
    def __init__(self, session: "FakeSession", submit: session_pb2.Submit):
        self.submit = submit
        self.started: session_pb2.Started | None = None
        self.error: RequestError | None = None
        self.cancels: list[int | str] = []
        self.prompt_logprobs = list(session.prompt_logprobs)
        self._session = session
        self._pending: dict[int, Delta] = {}
        self._over: set[int] = set()
        self._news = asyncio.Event()
        self._runs = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self._over) == self.submit.num_choices

    async def read(self) -> list[Delta]:
        while True:
            if self._pending:
                deltas, self._pending = list(self._pending.values()), {}
                return deltas
            if self.error is not None:
                raise self.error
            if self.is_over:
                return []
            self._news.clear()
            await self._news.wait()

    def take_prompt_logprobs(self) -> list[step_pb2.PromptLogprobs]:
        taken, self.prompt_logprobs = self.prompt_logprobs, []
        return taken

    def cancel(self) -> None:
        if not self.is_over:
            self.cancels.append("request")
        self.stop(session_pb2.FINISH_CAUSE_CANCELLED)
        if self._session.live.get(self.submit.request_id) is self:
            del self._session.live[self.submit.request_id]

    def cancel_choice(self, index: int) -> None:
        self.cancels.append(index)
        self._over.add(index)
        self._pending.pop(index, None)

    def stop(self, cause: "session_pb2.FinishCause") -> None:
        for index in range(self.submit.num_choices):
            self._end(index, session_pb2.Finished(cause=cause))

    def fail(self, error: RequestError) -> None:
        self.error = error
        self._news.set()

    def _end(self, index: int, finished: session_pb2.Finished) -> None:
        if index not in self._over:
            self._over.add(index)
            self._pending.setdefault(index, Delta(index, [])).finished = finished
            self._news.set()

    async def _run(self) -> None:
        submit = self.submit
        stop_ids = set(np.frombuffer(submit.stop_token_ids, "<i4").tolist())
        scripts = [iter(self._session.script(submit, i)) for i in range(submit.num_choices)]
        counts = [0] * submit.num_choices
        while not self.is_over:
            await self._session.gate.wait()
            await asyncio.sleep(0)
            self.started = self.started or session_pb2.Started(num_cached_tokens=self._session.cached)
            for index, tokens in enumerate(scripts):
                for _ in range(self._session.tokens_per_step):
                    if index not in self._over:
                        counts[index] += self._step(index, tokens, counts[index], stop_ids)

    def _step(self, index: int, tokens: Iterable[int], count: int, stop_ids: set[int]) -> int:
        submit = self.submit
        if submit.max_tokens == 0:
            self._end(index, self._finished(session_pb2.FINISH_CAUSE_LENGTH, 0))
            return 0
        token = next(tokens)
        delta = self._pending.setdefault(index, Delta(index, []))
        delta.token_ids.append(token)
        if submit.sampling.HasField("logprobs"):
            delta.logprobs.append(self._logprobs(token, submit.sampling.logprobs))
        if token in stop_ids and count + 1 >= submit.min_tokens:
            self._end(index, self._finished(session_pb2.FINISH_CAUSE_STOP, count + 1, token))
        elif count + 1 == submit.max_tokens:
            self._end(index, self._finished(session_pb2.FINISH_CAUSE_LENGTH, count + 1))
        self._news.set()
        return 1

    def _logprobs(self, token: int, width: int) -> step_pb2.RowLogprobs:
        values = np.array([float("-inf"), *([-1.5] * 19)][:width], "<f4")
        return step_pb2.RowLogprobs(
            logprob=float("-inf"), rank=3, top_token_ids=np.arange(width, dtype="<i4").tobytes(),
            top_logprobs=values.tobytes(),
        )  # fmt: skip

    def _finished(self, cause: "session_pb2.FinishCause", count: int, stop_id: int = 0) -> session_pb2.Finished:
        return session_pb2.Finished(
            cause=cause, stop_token_id=stop_id, num_output_tokens=count, num_cached_tokens=self._session.cached,
            num_preemptions=1, num_resumes=2,
        )  # fmt: skip


class FakeSession:
    def __init__(self, script: Script, *, vocab_size: int = 512, max_model_len: int = 256):
        self.script = script
        self.welcome: session_pb2.Welcome | None = session_pb2.Welcome(
            executor_ready=True,
            geometry=step_pb2.Geometry(
                num_blocks=max(20, max_model_len // 16 + 1), block_size=16, max_num_seqs=8, max_model_len=max_model_len,
                max_num_batched_tokens=64, vocab_size=vocab_size,
            ),
            model=step_pb2.ModelIdentity(architecture="TinyForCausalLM", dtype="float32"),
            device="cpu",
        )  # fmt: skip
        self.ready = True
        self.cached = 0
        self.prompt_logprobs: list[step_pb2.PromptLogprobs] = []
        self.tokens_per_step = 1
        self.gate = asyncio.Event()
        self.gate.set()
        self.watched: list[session_pb2.WatchBlocks] = []
        self.blocks = BlockFeed(self.watched.append)
        self.live: dict[str, FakeStream] = {}
        self.submitted: list[session_pb2.Submit] = []
        self.streams: list[FakeStream] = []
        self.cancelled: list[str] = []
        self.refuse_with: RequestError | None = None
        self.seen: admin_pb2.Snapshot | RequestError = admin_pb2.Snapshot()
        self.num_snapshots = 0
        self.stories: dict[str, list[str]] = {}
        self._callbacks: list[Callable[[], None]] = []

    async def start(self) -> None:
        pass

    async def snapshot(self, timeout_s: float = 2.0) -> admin_pb2.Snapshot:
        self.num_snapshots += 1
        if isinstance(self.seen, RequestError):
            raise self.seen
        return self.seen

    async def story(self, request_id: str, timeout_s: float = 2.0) -> list[str]:
        return self.stories.get(request_id, [])

    def end_streams(self) -> None:
        for stream in self.streams:
            stream.fail(Unavailable("the frontend is shutting down", retry_after_s=1.0))

    async def close(self) -> None:
        for stream in self.streams:
            stream._runs.cancel()
        await asyncio.gather(*(stream._runs for stream in self.streams), return_exceptions=True)

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def set_ready(self, ready: bool) -> None:
        self.ready = ready
        for callback in self._callbacks:
            callback()

    def submit(self, submit: session_pb2.Submit) -> FakeStream:
        if self.refuse_with is not None:
            raise self.refuse_with
        self.submitted.append(submit)
        stream = FakeStream(self, submit)
        self.streams.append(stream)
        if submit.request_id in self.live:
            stream.fail(AlreadyExists("request_id is live", field="request_id"))
        else:
            self.live[submit.request_id] = stream
        return stream

    def cancel_request(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        if request_id in self.live:
            self.live[request_id].stop(session_pb2.FINISH_CAUSE_CANCELLED)

    async def load(self, timeout_s: float = 2.0) -> session_pb2.Load:
        if not self.ready:
            raise Unavailable("the scheduler is away", retry_after_s=1.0)
        return session_pb2.Load(
            num_running=1, num_waiting=2, blocks_total=20, blocks_owned=3, blocks_cached=4,
            generation_tokens_total=5, prompt_tokens_total=6, prompt_tokens_cached_total=3, epoch=7,
            executor_ready=True, num_frontends=8,
        )  # fmt: skip

"""The frontend's side of the scheduler: one session that outlives connections and schedulers. asyncio, one thread.

Knows nothing of text or gRPC. Its laws: nothing is sent before a Welcome but hellos; whenever a session begins, every
live request is handed over, with what was delivered of it; a frame that is not understood is dropped and counted.
"""

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from protos.stepwire.admin.v1 import admin_pb2
from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.errors import REQUEST_ERRORS, RequestError, RequestFailed, Unavailable
from scheduler_svc.links import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from scheduler_svc.links.block_feed import BlockFeed
from scheduler_svc.links.pauses import Pauses
from scheduler_svc.links.questions import Questions
from scheduler_svc.links.streams import Choice, ChoiceDelta, RequestStream
from scheduler_svc.links.transport import BadFrames, Security, Wire, decode, drain

__all__ = ["ChoiceDelta", "RequestStream", "SchedulerSession"]

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1024
MAX_OUTBOX_FRAMES = 65_536
LEASE_EVERY_S = 1.0
# No Welcome, the answer to every lease, for this long: the session is in doubt.
SILENCE_S = 3.0
RETRY_S = 0.5
# Clients refused together are told times this share apart, so that they do not come back together.
RETRY_SPREAD = 0.5
_TRY_AGAIN = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


class SchedulerSession:
    def __init__(
        self, endpoint: str, *, fingerprint: str, resume_limit_s: float = 60.0, security: Security | None = None
    ) -> None:
        self.welcome: session_pb2.Welcome | None = None
        # Why the scheduler will never take this frontend; empty: it has not said so.
        self.refused = ""
        self.bad_frames = BadFrames()
        self._endpoint = endpoint
        self._hello = _frame(
            hello=session_pb2.FrontendHello(
                protocol_version=PROTOCOL_VERSION,
                oldest_protocol_version=OLDEST_PROTOCOL_VERSION,
                instance_id=secrets.randbits(64),
                fingerprint=fingerprint,
            )
        )
        self._resume_limit_s = resume_limit_s
        self._security = security
        self._callbacks: list[Callable[[], None]] = []
        self._is_connected = False
        self._is_open = False
        self._is_closed = False
        self._heard_at, self._pauses = 0.0, Pauses(LEASE_EVERY_S, time.monotonic())
        # Since when no executor is known to serve us; None: one does.
        self._away_since: float | None = None
        self._streams: dict[int, RequestStream] = {}  # by the handle of choice 0
        self._choices: dict[int, Choice] = {}  # by handle; of the streams above
        self._next_handle = 1
        self._questions = Questions()
        self._outbox: deque[bytes] = deque()
        self.blocks = BlockFeed(self._send_watch)
        self._cancels: deque[bytes] = deque()  # of requests by id, said while there was no session

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begins to look for the scheduler; does not wait for it. Raises StartupError for an unusable endpoint."""
        self._loop = asyncio.get_running_loop()
        self._wire = Wire(self._security)
        self._socket = self._wire.dealer(HIGH_WATER_MARK)
        self._monitor = self._wire.monitor(self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            self._wire.connect(self._socket, self._endpoint)
        except BaseException:
            self._wire.close()
            raise
        self._away_since = time.monotonic()
        self._loop.add_reader(self._socket.fileno(), self._pump)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._ticker = self._loop.create_task(self._tick_for_ever())
        self._watch()

    async def close(self) -> None:
        """Says goodbye: the scheduler releases our requests at once."""
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        self.end_streams()
        if self._is_open:
            self._send(_frame(goodbye=session_pb2.Goodbye()))
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._is_closed = True
        self._wire.close(linger_s=0.2)
        self._is_open = self._is_connected = False

    def end_streams(self) -> None:
        """Whoever still waits for an answer is told to ask another frontend."""
        for stream in list(self._streams.values()):
            stream.fail(Unavailable("the frontend is shutting down", retry_after_s=1.0), cancel=True)

    def on_change(self, callback: Callable[[], None]) -> None:
        """`callback` runs whenever `welcome`, `ready` or `refused` may have changed."""
        self._callbacks.append(callback)

    @property
    def ready(self) -> bool:
        """A request handed over now would be computed at once."""
        welcome = self.welcome
        return self._is_open and welcome is not None and welcome.executor_ready and not welcome.stalled

    @property
    def num_live(self) -> int:
        return len(self._streams)

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, submit: session_pb2.Submit) -> RequestStream:
        """Hands a request over, or keeps it while the scheduler is away for a moment. Never blocks."""
        if self.refused:
            raise Unavailable(f"the scheduler refuses this frontend: {self.refused}")
        if self.welcome is None:
            raise Unavailable("no scheduler has answered yet", retry_after_s=1.0)
        now = time.monotonic()
        if self._is_away_too_long(now) or len(self._outbox) > MAX_OUTBOX_FRAMES:
            raise self._unavailable()
        submit.handle = self._next_handle
        self._next_handle += max(1, submit.num_choices)
        stream = RequestStream(submit, self, now)
        self._streams[submit.handle] = stream
        for choice in stream.choices:
            self._choices[submit.handle + choice.index] = choice
        if self._is_open:
            self._send(_frame(submit=stream.next_submit()))
        else:
            stream.pause(now)
        return stream

    def cancel_request(self, request_id: str) -> None:
        """Ends a request by its id, on whatever frontend it lives."""
        for stream in [s for s in self._streams.values() if s.request_id == request_id]:
            if not self._is_open:
                stream.cancel()
                return
            stream.is_unwanted = True
        self.send_cancel(session_pb2.Cancel(request_id=request_id))

    async def load(self, timeout_s: float = 2.0) -> session_pb2.Load:
        """What the scheduler is doing right now."""
        return await self._ask(lambda i: _frame(load_query=session_pb2.LoadQuery(query_id=i)), timeout_s)

    async def snapshot(self, timeout_s: float = 2.0) -> admin_pb2.Snapshot:
        """Everything there is to see of the scheduler."""
        reply = await self._ask(lambda i: _frame(snapshot_query=session_pb2.SnapshotQuery(query_id=i)), timeout_s)
        return reply.snapshot

    async def story(self, request_id: str, timeout_s: float = 2.0) -> list[str]:
        """The last transitions of a request's sequences; empty when nobody remembers it."""
        query = session_pb2.StoryQuery
        reply = await self._ask(lambda i: _frame(story_query=query(query_id=i, request_id=request_id)), timeout_s)
        return list(reply.lines)

    async def _ask(self, question: Callable[[int], bytes], timeout_s: float) -> Any:
        if not self._is_open:
            raise self._unavailable()
        return await self._questions.ask(lambda number: self._send(question(number)), timeout_s)

    # ---- what streams ask --------------------------------------------------------------------------------------

    def send_cancel(self, cancel: session_pb2.Cancel) -> None:
        frame = _frame(cancel=cancel)
        if self._is_open:
            self._send(frame)
        elif cancel.WhichOneof("target") == "request_id":
            self._cancels.append(frame)
        # A choice that ended while there is no session: the resumption will say so.

    def _send_watch(self, watch: session_pb2.WatchBlocks) -> None:
        if self._is_open:
            self._send(_frame(watch_blocks=watch))

    def forget(self, stream: RequestStream) -> None:
        if self._streams.pop(stream.submit.handle, None) is not None:
            for choice in stream.choices:
                del self._choices[stream.submit.handle + choice.index]

    # ---- frames in ---------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Reads and writes until the socket has nothing more to give or take: its descriptor tells of edges only."""
        if self._is_closed:
            return  # asked for before the end
        for parts in drain(self._socket):
            message = decode(session_pb2.ToFrontend, parts[0]) if len(parts) == 1 else None
            if message is None:
                self.bad_frames.add("scheduler")
            else:
                self._on_message(message)
        self._flush()

    def _on_message(self, message: session_pb2.ToFrontend) -> None:
        self._heard_at = time.monotonic()
        match body := message.WhichOneof("body"):
            case "tokens":
                self._on_tokens(message.tokens)
            case "welcome":
                self._on_welcome(message.welcome)
            case "rejected":
                self._on_rejected(message.rejected)
            case "load" | "snapshot" | "story":
                self._questions.answered(getattr(message, body))
            case "block_news":
                self.blocks.on_news(message.block_news)
            case "refusal":
                if message.refusal.fatal:
                    self._on_fatal_refusal(message.refusal.reason)
                elif self._is_open:
                    self._lose(message.refusal.reason)
                    self._send(self._hello)

    def _on_tokens(self, frame: session_pb2.TokenFrame) -> None:
        num_bytes = len(frame.token_ids)
        if num_bytes % 4 or len(frame.positions) != num_bytes or len(frame.handles) != 2 * num_bytes:
            self.bad_frames.add("scheduler")
            return
        for started in frame.started:
            choice = self._choices.get(started.handle)
            if choice is not None and choice.index == 0 and choice.stream.started is None:
                choice.stream.started = started
        for scores in frame.prompt_logprobs:
            choice = self._choices.get(scores.handle)
            if choice is not None:
                choice.stream.push_prompt_logprobs(scores.values)
        logprobs = {entry.entry: entry.values for entry in frame.logprobs}
        choices = self._choices
        touched: dict[RequestStream, None] = {}  # one wake each, whatever a stream gets
        handles = np.frombuffer(frame.handles, "<u8").tolist()
        tokens = np.frombuffer(frame.token_ids, "<i4").tolist()
        positions = np.frombuffer(frame.positions, "<i4").tolist()
        for entry, (handle, token, position) in enumerate(zip(handles, tokens, positions, strict=True)):
            choice = choices.get(handle)
            if choice is not None:
                choice.push(token, position, logprobs.get(entry) if logprobs else None)
                touched[choice.stream] = None
        for finished in frame.finished:
            choice = self._choices.get(finished.handle)
            if choice is not None:
                choice.stream.finish(choice, finished)
        for stream in touched:
            stream.paused_at = None
            stream.wake()

    def _on_welcome(self, welcome: session_pb2.Welcome) -> None:
        before, self.welcome = self.welcome, welcome
        self.refused = ""  # that was another scheduler
        if before is not None and before.boot_id != welcome.boot_id:
            logger.warning("scheduler_changed boot_id=%016x live=%d", welcome.boot_id, len(self._streams))
        if not self._is_open:
            self._is_open = True
            logger.info("session_open boot_id=%016x live=%d", welcome.boot_id, len(self._streams))
            while self._cancels:
                self._send(self._cancels.popleft())
            for stream in list(self._streams.values()):
                self._send(_frame(submit=stream.next_submit()))
            self.blocks.session_began()
        self._note_path()
        self._changed()

    def _on_rejected(self, rejected: session_pb2.Rejected) -> None:
        stream = self._streams.get(rejected.handle)
        if stream is None:
            return
        retry_after_s = rejected.retry_after_ms / 1000 or None
        if stream.num_resumes and rejected.status in _TRY_AGAIN:
            # Taken once, so it is not refused for being new: a scheduler that drains or fills up gets it again later.
            stream.pause(time.monotonic())
            self._loop.call_later(retry_after_s or RETRY_S, self._resubmit, stream)
            return
        if retry_after_s is not None:
            retry_after_s *= 1 + random.random() * RETRY_SPREAD
        kind = REQUEST_ERRORS.get(rejected.status, RequestFailed)
        stream.fail(kind(rejected.message, field=rejected.field, retry_after_s=retry_after_s))

    def _resubmit(self, stream: RequestStream) -> None:
        if self._is_open and stream.submit.handle in self._streams:
            self._send(_frame(submit=stream.next_submit()))

    def _on_fatal_refusal(self, reason: str) -> None:
        logger.error("session_refused reason=%r", reason)
        self.refused = reason
        self._lose(reason)
        for stream in list(self._streams.values()):
            stream.fail(Unavailable(f"the scheduler refuses this frontend: {reason}"))
        self._changed()

    # ---- the connection ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Connections made and lost."""
        for parts in drain(self._monitor):
            event = parse_monitor_message(parts)["event"]
            self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._is_connected:
                self._lose("a new connection")
                self._send(self._hello)
            else:
                self._lose("the connection is lost")

    def _lose(self, reason: str) -> None:
        """The session is over. Live requests wait for the next one."""
        self._outbox.clear()
        if self._is_open:
            logger.warning("session_lost reason=%r live=%d", reason, len(self._streams))
            self._is_open = False
            now = time.monotonic()
            for stream in list(self._streams.values()):
                stream.lose(now)
            self._questions.fail(self._unavailable)
        self._note_path()
        self._changed()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LEASE_EVERY_S)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        self._heard_at += self._pauses.look(now)
        if self._is_open and now - self._heard_at > SILENCE_S:
            self._lose(f"the scheduler is silent for {SILENCE_S:g} s")
        if self._is_open:
            self._send(_frame(lease=session_pb2.Lease()))
        elif self._is_connected and not self.refused:
            self._outbox.clear()
            self._send(self._hello)
        self._give_up(now)
        self._pump()
        self._watch()

    def _give_up(self, now: float) -> None:
        """Requests that nobody has worked on for longer than the resume limit end."""
        away = self._is_away_too_long(now)
        for stream in list(self._streams.values()):
            paused = stream.paused_at is not None and now - stream.paused_at > self._resume_limit_s
            if away or paused:
                stream.fail(self._unavailable(), cancel=True)

    def _is_away_too_long(self, now: float) -> bool:
        return self._away_since is not None and now - self._away_since > self._resume_limit_s

    def _unavailable(self) -> RequestError:
        part = "executor" if self._is_open else "scheduler"
        return Unavailable(f"the {part} is away", retry_after_s=1.0)

    def _note_path(self) -> None:
        serves = self._is_open and self.welcome is not None and self.welcome.executor_ready
        if serves:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    # ---- frames out --------------------------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox and self._is_connected:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()
        except zmq.Again:
            pass  # the descriptor tells when there is room again
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._pump)


def _frame(**body: Any) -> bytes:
    return session_pb2.ToScheduler(**body).SerializeToString()

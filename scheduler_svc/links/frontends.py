"""The scheduler's side of many frontends: sessions with leases, and one frame per step for each of them.

Knows nothing of plans or executors. Its laws: a hello always begins a new session (and ends the one its sender had,
with all its requests: the frontend submits again what lives); a frontend that is silent for a lease, gone, or too slow
to read its frames loses its session; a frame is sent, or kept in order in a bounded queue, or its session ends.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.core.contract import Output
from scheduler_svc.errors import RequestError
from scheduler_svc.links import PROTOCOL_VERSION, versions_differ
from scheduler_svc.links.messages import MAX_NAME_BYTES, frames
from scheduler_svc.links.transport import BadFrames, Wire, well_formed

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 256
LEASE_S = 5.0
MAX_SESSIONS = 1024
MAX_PENDING_FRAMES = 4096
MAX_PENDING_BYTES = 64 * 2**20


@dataclass(slots=True)
class Session:
    """One frontend, from its hello to its goodbye. `number` is never used again in this process."""

    number: int
    identity: bytes
    instance_id: int
    fingerprint: str
    expires_at: float
    # Frames its socket had no room for, oldest first. Sending goes on here as long as it is not empty.
    pending: deque[bytes] = field(default_factory=deque)
    pending_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    session: int
    submit: session_pb2.Submit


@dataclass(frozen=True, slots=True)
class Cancelled:
    """By request id (anybody's) or by handle (one choice of this session's own)."""

    session: int
    request_id: str | None
    handle: int | None


@dataclass(frozen=True, slots=True)
class LoadAsked:
    session: int
    query_id: int


@dataclass(frozen=True, slots=True)
class BlocksWatched:
    session: int
    watch: session_pb2.WatchBlocks


@dataclass(frozen=True, slots=True)
class SnapshotAsked:
    session: int
    query_id: int


@dataclass(frozen=True, slots=True)
class StoryAsked:
    session: int
    query_id: int
    request_id: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Its requests are to be released."""

    session: int
    reason: str


Event = Submitted | Cancelled | LoadAsked | BlocksWatched | SnapshotAsked | StoryAsked | SessionEnded


class FrontendLink:
    def __init__(self, wire: Wire, endpoint: str, boot_id: int, bad_frames: BadFrames) -> None:
        self.socket = wire.bind_router(endpoint, HIGH_WATER_MARK)
        self._wire = wire
        self.lease_s = LEASE_S
        self.welcome = session_pb2.Welcome(
            boot_id=boot_id, protocol_version=PROTOCOL_VERSION, lease_ms=round(LEASE_S * 1000)
        )
        self._bad_frames = bad_frames
        self._next_number = 1
        self._by_number: dict[int, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._ended: list[SessionEnded] = []

    @property
    def num_sessions(self) -> int:
        return len(self._by_number)

    @property
    def sessions(self) -> list[Session]:
        return list(self._by_number.values())

    @property
    def has_pending(self) -> bool:
        return any(session.pending for session in self._by_number.values())

    def receive(self, now: float) -> Iterator[Event]:
        """What frontends ask, in order. Sessions that ended meanwhile come first: their names may be used again."""
        for identity, message in well_formed(
            self._wire.drain(self.socket), session_pb2.ToScheduler, self._bad_frames, "frontend"
        ):
            event = self._on_message(identity, message, now)
            yield from self._take_ended()
            if event is not None:
                yield event
        yield from self._take_ended()

    def excuse(self, paused_s: float) -> None:
        """This process stood still so long: no lease ran on."""
        for session in self._by_number.values():
            session.expires_at += paused_s

    def expire(self, now: float) -> Iterator[SessionEnded]:
        """Sessions whose lease ran out, and those that ended while sending."""
        for session in [s for s in self._by_number.values() if s.expires_at <= now]:
            self._end(session, "its lease ran out")
        yield from self._take_ended()

    def send_output(self, output: Output) -> None:
        for number, frame in frames(output):
            session = self._by_number.get(number)
            if session is not None:
                self._send(session, frame)

    def reject(self, number: int, handle: int, error: RequestError) -> None:
        rejected = session_pb2.Rejected(
            handle=handle,
            status=error.status,
            message=error.message,
            field=error.field,
            retry_after_ms=round((error.retry_after_s or 0) * 1000),
        )
        self._send_to(number, session_pb2.ToFrontend(rejected=rejected))

    def send_load(self, number: int, load: session_pb2.Load) -> None:
        self._send_to(number, session_pb2.ToFrontend(load=load))

    def send_block_news(self, number: int, news: session_pb2.BlockNews) -> None:
        self._send_to(number, session_pb2.ToFrontend(block_news=news))

    def send_snapshot(self, number: int, reply: session_pb2.SnapshotReply) -> None:
        self._send_to(number, session_pb2.ToFrontend(snapshot=reply))

    def send_story(self, number: int, reply: session_pb2.StoryReply) -> None:
        self._send_to(number, session_pb2.ToFrontend(story=reply))

    def flush(self) -> None:
        """Tries again to send what had no room."""
        for session in [s for s in self._by_number.values() if s.pending]:
            while session.pending and self._try(session, session.pending[0]):
                session.pending_bytes -= len(session.pending.popleft())

    def publish(self) -> None:
        """The truth in `welcome` changed: everybody hears it. A frontend with another tokenizer is refused."""
        for session in list(self._by_number.values()):
            reason = self._model_differs(session.fingerprint)
            if reason:
                self._refuse(session.identity, reason, fatal=True)
                self._end(session, reason)
            else:
                self._send(session, self._welcome_frame())

    # ---- one message -------------------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, message: session_pb2.ToScheduler, now: float) -> Event | None:
        body = message.WhichOneof("body")
        if body == "hello":
            self._on_hello(identity, message.hello, now)
            return None
        session = self._by_identity.get(identity)
        if session is None:
            if body != "goodbye":
                self._refuse(identity, "no session: say hello", fatal=False)
            return None
        session.expires_at = now + self.lease_s
        match body:
            case "submit":
                return Submitted(session.number, message.submit)
            case "cancel" if message.cancel.WhichOneof("target") == "request_id":
                return Cancelled(session.number, message.cancel.request_id, None)
            case "cancel" if message.cancel.WhichOneof("target") == "handle":
                return Cancelled(session.number, None, message.cancel.handle)
            case "lease":
                self._send(session, self._welcome_frame())
            case "load_query":
                return LoadAsked(session.number, message.load_query.query_id)
            case "watch_blocks" if len(message.watch_blocks.tenant.encode()) <= MAX_NAME_BYTES:
                return BlocksWatched(session.number, message.watch_blocks)
            case "snapshot_query":
                return SnapshotAsked(session.number, message.snapshot_query.query_id)
            case "story_query":
                return StoryAsked(session.number, message.story_query.query_id, message.story_query.request_id)
            case "goodbye":
                self._end(session, "it said goodbye")
            case _:
                self._bad_frames.add("frontend")
        return None

    def _on_hello(self, identity: bytes, hello: session_pb2.FrontendHello, now: float) -> None:
        for old in [
            s for s in self._by_number.values() if s.instance_id == hello.instance_id or s.identity == identity
        ]:
            self._end(old, "it said hello again")
        reason = versions_differ(hello.protocol_version, hello.oldest_protocol_version)
        reason = reason or self._model_differs(hello.fingerprint)
        if reason or len(self._by_number) >= MAX_SESSIONS:
            self._refuse(identity, reason or f"{MAX_SESSIONS} frontends are connected", fatal=bool(reason))
            return
        session = Session(self._next_number, identity, hello.instance_id, hello.fingerprint, now + self.lease_s)
        self._next_number += 1
        self._by_number[session.number] = self._by_identity[identity] = session
        logger.info("session_began session=%d instance=%016x", session.number, hello.instance_id)
        self._send(session, self._welcome_frame())

    def _model_differs(self, fingerprint: str) -> str:
        model = self.welcome.model.fingerprint
        if not model or fingerprint == model:
            return ""
        return (
            f"model mismatch: the executor's model and tokenizer are {model}, the frontend's {fingerprint or 'unknown'}"
        )

    # ---- sending -----------------------------------------------------------------------------------------------

    def _welcome_frame(self) -> bytes:
        return session_pb2.ToFrontend(welcome=self.welcome).SerializeToString()

    def _send_to(self, number: int, message: session_pb2.ToFrontend) -> None:
        session = self._by_number.get(number)
        if session is not None:
            self._send(session, message.SerializeToString())

    def _send(self, session: Session, frame: bytes) -> None:
        if not session.pending and self._try(session, frame):
            return
        if session.number not in self._by_number:
            return  # it ended while trying
        session.pending.append(frame)
        session.pending_bytes += len(frame)
        if len(session.pending) > MAX_PENDING_FRAMES or session.pending_bytes > MAX_PENDING_BYTES:
            self._end(session, f"it does not read: {len(session.pending)} frames are waiting for it")

    def _try(self, session: Session, frame: bytes) -> bool:
        """True: sent. False: no room, or the peer is gone and its session ended."""
        try:
            self.socket.send_multipart((session.identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._end(session, "it is gone")
            return False
        return True

    def _refuse(self, identity: bytes, reason: str, *, fatal: bool) -> None:
        refusal = session_pb2.ToFrontend(refusal=step_pb2.Refusal(reason=reason, fatal=fatal))
        if fatal:
            logger.warning("frontend_refused reason=%r", reason)
        try:
            self.socket.send_multipart((identity, refusal.SerializeToString()), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("refusal_not_sent error=%r", str(error))

    def _end(self, session: Session, reason: str) -> None:
        if self._by_number.pop(session.number, None) is None:
            return
        del self._by_identity[session.identity]
        session.pending.clear()
        logger.info("session_ended session=%d reason=%r", session.number, reason)
        self._ended.append(SessionEnded(session.number, reason))

    def _take_ended(self) -> list[SessionEnded]:
        ended, self._ended = self._ended, []
        return ended

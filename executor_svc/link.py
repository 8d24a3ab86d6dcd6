"""The executor's end of the wire: hello until served, plans in, results and heartbeats out.

The main thread owns the step socket and never shares it; a thread of its own sends heartbeats on a second socket, so
that a long step is told from a dead process. Knows nothing of rows, blocks or models.

    with ExecutorLink(hello, settings) as link:
        while (event := link.receive()) is not None:
            match event:
                case EpochStarted(): ...forget every row...
                case StepPlan(): ...compute...; link.send_result(result)   # or link.fault("why", kind)
"""

import contextlib
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth
from google.protobuf.message import DecodeError

from executor_svc.errors import ExecutorError, Refused, StartupError
from executor_svc.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    EpochStarted,
    NotServed,
    ProtocolState,
    Violation,
)
from protos.stepwire.wire.v1 import step_pb2

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
HIGH_WATER_MARK = 8
HELLO_EVERY_S = 1.0
BEAT_EVERY_S = 0.5
POLL_EVERY_S = 0.1
# While nobody is connected: how soon the hello is tried again.
SEEK_EVERY_S = 0.02
# Later than this to a look that comes with every poll, and this process stood still itself.
LATE_S = 1.0
# sysexits' EX_SOFTWARE: the device hangs, only a new process helps.
EXIT_HUNG = 70
# At an end by an error: what the scheduler is told about it may take so long to leave.
LAST_WORDS_S = 0.5


class LinkClosed(ExecutorError):
    """The parent process is gone."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    endpoint: str
    beat_endpoint: str
    # Silence of the scheduler after which a serving executor fences itself: the epoch is over, no plan of it runs and
    # no result of it leaves.
    fence_after_s: float = 5.0
    # Silence after which a process still busy with one step counts as hung and ends itself: its scheduler has given it
    # up. Long, because a long step may outlive a scheduler.
    hung_after_s: float = 20.0
    # End when this is no longer our parent. None: do not look.
    parent_pid: int | None = None
    # Renewed with every heartbeat, for whoever watches over this process. None: nobody does.
    pulse_file: Path | None = None
    insecure_wire: bool = False
    # CURVE certificate files: our own secret one, and the scheduler's public one.
    curve_secret: Path | None = None
    curve_server: Path | None = None


class ExecutorLink:
    def __init__(self, hello: step_pb2.ExecutorHello, settings: LinkSettings) -> None:
        """`hello` carries geometry, model, device and backend; the rest of it is filled in here."""
        self.instance_id = secrets.randbits(64)
        hello.instance_id = self.instance_id
        hello.protocol_version = PROTOCOL_VERSION
        hello.oldest_protocol_version = OLDEST_PROTOCOL_VERSION
        self._hello = step_pb2.FromExecutor(hello=hello)
        self._settings = settings
        self._state = ProtocolState()
        self._stopping = False
        self._next_hello = 0.0
        self._last_refusal = ""
        self.num_bad_frames = 0
        self._context = zmq.Context()
        self._socket = _connect(self._context, settings.endpoint, settings)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._heart = Heart(self._context, settings, self.instance_id)

    def __enter__(self) -> "ExecutorLink":
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0.0 if kind is None else LAST_WORDS_S)

    def close(self, linger_s: float = 0.0) -> None:
        """`linger_s`: how long what was said last may still take to leave."""
        self._heart.stop()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=round(linger_s * 1000))
        self._context.term()

    def stop(self) -> None:
        """Makes receive() return None soon. May be called from a signal handler."""
        self._stopping = True

    @property
    def serving(self) -> bool:
        return self._state.serving

    def receive(self, timeout_s: float | None = None) -> EpochStarted | step_pb2.StepPlan | None:
        """The next thing to do, in order. None: stopped, or nothing came within `timeout_s` (None: no limit)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._stopping:
            self._look_around()
            wait_s = POLL_EVERY_S if self._state.serving else SEEK_EVERY_S
            if deadline is not None:
                wait_s = min(wait_s, max(0.0, deadline - time.monotonic()))
            if self._socket.poll(round(wait_s * 1000)):
                event = self._take()
                if event is not None:
                    return event
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        return None

    def send_result(self, result: step_pb2.StepResult) -> None:
        self._heart.step_ended()
        if self._state.accepts(result):
            self._send(step_pb2.FromExecutor(result=result).SerializeToString())

    def drop_result(self) -> None:
        """A step is done, and nobody wants to know: its epoch is over."""
        self._heart.step_ended()

    def fault(self, message: str, kind: "step_pb2.FaultKind") -> None:
        """This side cannot go on with the epoch: the device failed, or a plan broke the contract. It is the end of one
        step; results of others are still to be sent or dropped."""
        self._heart.step_ended()
        if not self._state.serving:
            return  # the epoch ended while the step ran
        logger.error("epoch_faulted epoch=%d step=%d reason=%r", self._state.epoch, self._state.last_step, message)
        self._send_fault(self._state.fault(message, kind))

    def _take(self) -> EpochStarted | step_pb2.StepPlan | None:
        message = self._decode(self._socket.recv_multipart())
        action = self._state.on_message(message) if message is not None else None
        match action:
            case EpochStarted():
                self._heart.restart()
                logger.info("epoch_started boot_id=%016x epoch=%d", action.boot_id, action.epoch)
                return action
            case step_pb2.StepPlan():
                self._heart.step_began(action.step_id)
                return action
            case NotServed():
                self._on_refused(action)
            case Violation():
                logger.error("plan_refused reason=%r", action.fault.message)
                self._send_fault(action.fault)
        return None

    def _decode(self, parts: list[bytes]) -> step_pb2.ToExecutor | None:
        if len(parts) == 1:
            try:
                message = step_pb2.ToExecutor.FromString(parts[0])
            except DecodeError:
                message = None
            if message is not None and message.WhichOneof("body") is not None:
                return message
        self.num_bad_frames += 1
        return None

    def _on_refused(self, refused: NotServed) -> None:
        if refused.fatal:
            raise Refused(f"the scheduler at {self._settings.endpoint} refuses this executor: {refused.reason}")
        if refused.reason != self._last_refusal:
            logger.info("waiting reason=%r", refused.reason)
            self._last_refusal = refused.reason
        if self._state.fence():  # it does not know the epoch we think we serve
            self._end_epoch(refused.reason)

    def _look_around(self) -> None:
        """What no message tells: silence, another scheduler, a dead parent; and says hello when it is time."""
        now = time.monotonic()
        heart = self._heart
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            if self._state.fence():  # the scheduler knows connections, not us: on a new one we are nobody yet
                self._end_epoch("the connection is lost")
        if self._state.serving and heart.scheduler_boot_id and self._state.on_scheduler_boot(heart.scheduler_boot_id):
            self._end_epoch("another scheduler answers")
        if heart.silent_s(now) > self._settings.fence_after_s and self._state.fence():
            self._end_epoch(f"heard nothing from the scheduler for {self._settings.fence_after_s:g} s")
        parent = self._settings.parent_pid
        if parent is not None and os.getppid() != parent:
            raise LinkClosed("the parent process is gone")
        if not self._state.serving and now >= self._next_hello and self._say_hello():
            self._next_hello = now + HELLO_EVERY_S

    def _say_hello(self) -> bool:
        hello = self._hello.hello
        hello.boot_id, hello.epoch = self._state.boot_id, self._state.epoch
        return self._send(self._hello.SerializeToString())

    def _send_fault(self, fault: step_pb2.Fault) -> None:
        self._send(step_pb2.FromExecutor(fault=fault).SerializeToString())
        self._end_epoch(fault.message)

    def _end_epoch(self, reason: str) -> None:
        logger.warning("epoch_ended epoch=%d reason=%r", self._state.epoch, reason)
        self._heart.restart()
        self._next_hello = 0.0

    def _send(self, frame: bytes) -> bool:
        """Never blocks. False: nobody is there to read it; the heartbeat tells the rest."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


class Heart:
    """Sends a Beat twice a second from a thread of its own, and notes when the scheduler was last heard and which.

    The main thread calls the methods; attributes are replaced whole, never changed in place.
    """

    def __init__(
        self,
        context: zmq.Context,
        settings: LinkSettings,
        instance_id: int,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.last_heard = self._ran_at = time.monotonic()
        self.scheduler_boot_id = 0
        self._context = context
        self._settings = settings
        self._instance_id = instance_id
        self._end_process = end_process
        # The newest step begun, how many are not ended, and since when the oldest of them runs.
        self._steps: tuple[int, int, float | None] = (0, 0, None)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def restart(self) -> None:
        """An epoch begins or ends: silence counts from now, and which scheduler answers is yet to be heard."""
        self.last_heard = time.monotonic()
        self.scheduler_boot_id = 0

    def silent_s(self, now: float) -> float:
        """How long the scheduler has not been heard while this process ran, and would have heard it."""
        return min(now, self._ran_at + LATE_S) - self.last_heard

    def step_began(self, step_id: int) -> None:
        _, running, began = self._steps
        self._steps = (step_id, running + 1, time.monotonic() if began is None else began)

    def step_ended(self) -> None:
        """The oldest one: steps end in their order."""
        newest, running, _ = self._steps
        self._steps = (newest, running - 1, time.monotonic() if running > 1 else None)

    def _oldest(self) -> tuple[int, float | None]:
        """(the step being computed or last computed, since when it is)."""
        newest, running, began = self._steps
        return newest - max(0, running - 1), began

    def _run(self) -> None:
        socket = _connect(self._context, self._settings.beat_endpoint, self._settings)
        try:
            while not self._stop.is_set():
                self._run_on()
                if self._is_hung():
                    logger.critical("hung step=%d: the process ends", self._oldest()[0])
                    self._end_process(EXIT_HUNG)
                    return
                self._beat(socket)
                if self._settings.pulse_file is not None:
                    renew(self._settings.pulse_file)
                deadline = time.monotonic() + BEAT_EVERY_S
                while not self._stop.is_set() and (left := deadline - time.monotonic()) > 0:
                    if socket.poll(round(min(left, POLL_EVERY_S) * 1000)):
                        self._hear(socket.recv_multipart())
                    self._run_on()
        finally:
            socket.close()

    def _run_on(self) -> None:
        """Time in which this process stood still is not the scheduler's silence."""
        now = time.monotonic()
        if now - self._ran_at > LATE_S:
            self.last_heard = min(now, self.last_heard + now - self._ran_at)
        self._ran_at = now

    def _is_hung(self) -> bool:
        """The main thread is in a step, and the scheduler has not answered for long: it has given us up."""
        _, began = self._oldest()
        quiet_since = max(self.last_heard, began or 0.0)
        return began is not None and time.monotonic() - quiet_since > self._settings.hung_after_s

    def _beat(self, socket: zmq.Socket) -> None:
        step_id, began = self._oldest()
        busy_ms = 0 if began is None else max(1, round((time.monotonic() - began) * 1000))
        beat = step_pb2.Beat(instance_id=self._instance_id, step_id=step_id, busy_ms=busy_ms)
        try:
            socket.send(step_pb2.FromExecutor(beat=beat).SerializeToString(), zmq.NOBLOCK)
        except zmq.Again:
            return  # nobody is there: silence is noticed by last_heard

    def _hear(self, parts: list[bytes]) -> None:
        try:
            message = step_pb2.ToExecutor.FromString(parts[0])
        except DecodeError:
            return
        if message.WhichOneof("body") == "beat":
            self.scheduler_boot_id = message.beat.instance_id
            self.last_heard = time.monotonic()


def renew(path: Path) -> None:
    """Sets its modification time to now."""
    with contextlib.suppress(OSError):  # not written yet, or the supervisor has cleaned up: nobody looks at it
        os.utime(path)


def check_endpoint(endpoint: str, settings: LinkSettings) -> None:
    """Plain tcp leaves this host only when asked for by name."""
    if settings.curve_server is not None or settings.insecure_wire or not endpoint.startswith("tcp://"):
        return
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise StartupError(
            f"{endpoint} would cross the network in the clear: "
            "give --curve-secret and --curve-server, or accept it with --insecure-wire"
        )


def _connect(context: zmq.Context, endpoint: str, settings: LinkSettings) -> zmq.Socket:
    check_endpoint(endpoint, settings)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        if endpoint.startswith("tcp://"):
            _use_curve(socket, settings)
        socket.connect(endpoint)
    except (zmq.ZMQError, OSError, ValueError) as error:
        socket.close()
        raise StartupError(f"cannot connect to {endpoint}: {error}") from error
    return socket


def _use_curve(socket: zmq.Socket, settings: LinkSettings) -> None:
    own, server = settings.curve_secret, settings.curve_server
    if own is None and server is None:
        return
    if own is None or server is None:
        raise StartupError("--curve-secret, this executor's own key, and --curve-server go together: give both")
    public, secret = zmq.auth.load_certificate(own)
    if secret is None:
        raise StartupError(f"{own} holds no secret key: give the .key_secret file")
    socket.curve_publickey, socket.curve_secretkey = public, secret
    socket.curve_serverkey = zmq.auth.load_certificate(server)[0]

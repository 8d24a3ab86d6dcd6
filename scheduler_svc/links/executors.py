"""The scheduler's side of executors: one serves, others stand by, and one answer to every doubt: the epoch ends.

Knows nothing of requests, sequences or blocks. Its laws: plans go to the serving executor only, results are taken from
it only, in order and of this boot and epoch; whatever else arrives is dropped and counted, or ends the epoch by raising
an ExecutorError. Loss is seen by four signals: the connection, the heartbeat, the age of the oldest step, what it says.
"""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.errors import EndReason, ExecutorLost, ProtocolViolation
from scheduler_svc.links import versions_differ
from scheduler_svc.links.budget import StepBudget
from scheduler_svc.links.messages import geometry_fault, num_planned_tokens
from scheduler_svc.links.transport import BadFrames, Wire, decode, well_formed

logger = logging.getLogger(__name__)

# Two plans in flight, a start, a refusal, a probe: more means it does not read.
HIGH_WATER_MARK = 16
BEAT_TIMEOUT_S = 3.0
# After a connection was lost: how often to ask, and how far apart, whether it was the serving executor's.
NUM_PROBES = 5
PROBE_EVERY_S = 0.02
MAX_STANDBY = 64
MAX_BACK_OFF_S = 5.0
# Executors of this version on say in their hello which epoch they have known.
HELLO_NAMES_EPOCH = 2
FAULT_REASONS = {
    step_pb2.FAULT_KIND_PLAN_REFUSED: EndReason.PLAN_REFUSED,
    step_pb2.FAULT_KIND_NOT_FINITE: EndReason.NOT_FINITE,
    step_pb2.FAULT_KIND_COMPUTE: EndReason.BAD_COMPUTE,
    step_pb2.FAULT_KIND_CRASH: EndReason.CRASH,
}


@dataclass(slots=True)
class Executor:
    """One executor process, served or standing by."""

    identity: bytes
    hello: step_pb2.ExecutorHello
    heard_at: float


@dataclass(frozen=True, slots=True)
class InFlight:
    step_id: int
    sent_at: float
    num_tokens: int


class ExecutorLink:
    def __init__(
        self, wire: Wire, endpoints: tuple[str, str], boot_id: int, bad_frames: BadFrames, budget: StepBudget
    ) -> None:
        """`endpoints`: of plans and of heartbeats."""
        self._wire = wire
        self.socket = wire.bind_router(endpoints[0], HIGH_WATER_MARK)
        self.beat_socket = wire.bind_router(endpoints[1], HIGH_WATER_MARK)
        self.monitor = wire.monitor(self.socket, zmq.EVENT_DISCONNECTED)
        self.boot_id = boot_id
        self.epoch = 0
        self.active: Executor | None = None
        # The first executor settles what is served; the others must offer the same.
        self.pinned: step_pb2.ExecutorHello | None = None
        self.num_stale = 0
        # Seconds from when each step could begin to its result, of all epochs together.
        self.step_s = 0.0
        self._budget = budget
        self._bad_frames = bad_frames
        self._standby: dict[int, Executor] = {}
        self._in_flight: deque[InFlight] = deque()
        self._moved_at = 0.0
        self._num_rows = 0
        self._num_results = 0
        self._probes_left = 0
        self._probe_at = 0.0
        self._num_barren = 0
        self._not_before = 0.0

    @property
    def num_standby(self) -> int:
        return len(self._standby)

    @property
    def standby(self) -> list[Executor]:
        return list(self._standby.values())

    # ---- what arrives ------------------------------------------------------------------------------------------

    def receive(self, now: float) -> Iterator[step_pb2.StepResult]:
        """Results that are next in order. Raises ExecutorError when the epoch is over."""
        for parts in self._wire.drain(self.socket):
            message = decode(step_pb2.FromExecutor, parts[1]) if len(parts) == 2 else None
            if message is None:
                self._bad_frames.add("executor")
                if self._is_active(parts[0]):
                    raise ProtocolViolation("it sent a frame that cannot be read", EndReason.BAD_FRAME)
                continue
            match message.WhichOneof("body"):
                case "hello":
                    self._on_hello(parts[0], message.hello, now)
                case "result":
                    if self._is_next(parts[0], message.result, now):
                        yield message.result
                case "fault":
                    self._on_fault(parts[0], message.fault)

    def receive_beats(self, now: float) -> None:
        """Notes who lives, and answers. Strangers get no answer: an executor we lost must notice that."""
        beats = self._wire.drain(self.beat_socket)
        for identity, message in well_formed(beats, step_pb2.FromExecutor, self._bad_frames, "beat"):
            if message.WhichOneof("body") != "beat":
                self._bad_frames.add("beat")
                continue
            executor = self._find(message.beat.instance_id)
            if executor is not None:
                executor.heard_at = now
                self._send(self.beat_socket, identity, self._beat())

    def _on_hello(self, identity: bytes, hello: step_pb2.ExecutorHello, now: float) -> None:
        if self._crosses_start(identity, hello):
            return
        self._standby.pop(hello.instance_id, None)
        reason = self._why_never(hello)
        if reason or len(self._standby) >= MAX_STANDBY:
            logger.error("executor_refused instance=%016x reason=%r", hello.instance_id, reason)
            self._refuse(identity, reason or f"{MAX_STANDBY} executors stand by", fatal=bool(reason))
            return
        self._standby[hello.instance_id] = Executor(identity, hello, now)
        active = self.active
        if active is None:
            return
        if active.hello.instance_id == hello.instance_id or active.identity == identity:
            raise ExecutorLost("it says hello again", EndReason.HELLO_AGAIN)
        self._refuse(identity, "another executor serves: standing by", fatal=False)

    def _crosses_start(self, identity: bytes, hello: step_pb2.ExecutorHello) -> bool:
        """Whether the serving executor said this before it read our StartEpoch, which is on its way."""
        active = self.active
        if active is None or active.identity != identity or active.hello.instance_id != hello.instance_id:
            return False
        if hello.protocol_version < HELLO_NAMES_EPOCH:
            return False
        return (hello.boot_id, hello.epoch) != (self.boot_id, self.epoch)

    def _why_never(self, hello: step_pb2.ExecutorHello) -> str:
        """Why this executor will never be served; empty: it may be."""
        reason = versions_differ(hello.protocol_version, hello.oldest_protocol_version) or geometry_fault(
            hello.geometry
        )
        if reason or self.pinned is None:
            return reason
        ours, theirs = self.pinned, hello
        for name in ("architecture", "fingerprint", "dtype", "kv_dtype"):
            if getattr(ours.model, name) != getattr(theirs.model, name):
                return _mismatch(f"model {name}", getattr(ours.model, name), getattr(theirs.model, name))
        for name in ("block_size", "vocab_size"):
            if getattr(ours.geometry, name) != getattr(theirs.geometry, name):
                return _mismatch(name, getattr(ours.geometry, name), getattr(theirs.geometry, name))
        return ""

    def _is_next(self, identity: bytes, result: step_pb2.StepResult, now: float) -> bool:
        ours = self._is_active(identity) and (result.boot_id, result.epoch) == (self.boot_id, self.epoch)
        oldest = self._in_flight[0] if self._in_flight else None
        if not ours or oldest is None or result.step_id < oldest.step_id:
            self.num_stale += 1
            return False
        if result.step_id != oldest.step_id:
            raise ProtocolViolation(f"result of step {result.step_id}, expected {oldest.step_id}")
        self._in_flight.popleft()
        took_s = now - self._age_start(oldest)
        self._budget.observe(took_s, oldest.num_tokens)
        self.step_s += took_s
        self._moved_at = now
        self._num_rows = result.num_rows
        self._num_results += 1
        return True

    def _on_fault(self, identity: bytes, fault: step_pb2.Fault) -> None:
        if not self._is_active(identity) or (fault.boot_id, fault.epoch) != (self.boot_id, self.epoch):
            self.num_stale += 1
            return
        reason = FAULT_REASONS.get(fault.kind, EndReason.FAULT)
        raise ExecutorLost(f"it reports a fault in step {fault.step_id}: {fault.message}", reason)

    # ---- the epoch ---------------------------------------------------------------------------------------------

    def next_executor(self, now: float) -> Executor | None:
        """Who would serve next: the one that has stood by longest. None: nobody, or it is too early to try again."""
        if int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return None  # after a pause of ours, hellos of one executor wait in a row: only the last one counts
        for instance_id in [i for i, e in self._standby.items() if now - e.heard_at > BEAT_TIMEOUT_S]:
            del self._standby[instance_id]
        if self.active is not None or now < self._not_before:
            return None
        return next(iter(self._standby.values()), None)

    def start_epoch(self, executor: Executor, now: float) -> None:
        """`executor` serves from here on. Raises ExecutorLost when it is gone already."""
        assert self.active is None
        del self._standby[executor.hello.instance_id]
        self.epoch += 1
        self.active = executor
        self.pinned = self.pinned or executor.hello
        executor.heard_at = now
        self._budget.restart()
        self._num_rows = self._num_results = 0
        start = step_pb2.StartEpoch(boot_id=self.boot_id, epoch=self.epoch)
        self._send_active(step_pb2.ToExecutor(start_epoch=start).SerializeToString())
        logger.info(
            "epoch_began epoch=%d instance=%016x device=%r",
            self.epoch,
            executor.hello.instance_id,
            executor.hello.device,
        )

    def end_epoch(self, reason: str, now: float) -> None:
        """The serving executor serves no more. It is told; it may say hello again and keep its weights."""
        if self.active is None:
            return
        logger.warning("epoch_ended epoch=%d reason=%r in_flight=%d", self.epoch, reason, len(self._in_flight))
        # An executor that dies on every first step must not be asked in a tight loop.
        self._num_barren = self._num_barren + 1 if self._in_flight and not self._num_results else 0
        if self._num_barren > 1:
            self._not_before = now + min(MAX_BACK_OFF_S, 0.1 * 2**self._num_barren)
        self._refuse(self.active.identity, f"epoch {self.epoch} is over: {reason}", fatal=False)
        self.active = None
        self._in_flight.clear()
        self._probes_left = 0

    def send_plan(self, plan: step_pb2.StepPlan, now: float) -> int:
        """Returns the bytes sent. Raises ExecutorLost when the executor is gone or does not read."""
        frame = step_pb2.ToExecutor(plan=plan).SerializeToString()
        num_tokens = num_planned_tokens(plan, self._num_rows + len(plan.admit))
        self._in_flight.append(InFlight(plan.step_id, now, num_tokens))
        self._send_active(frame)
        return len(frame)

    def excuse(self, paused_s: float) -> None:
        """This process stood still so long: no executor was silent for it, and no step took it."""
        for executor in (*self.standby, *filter(None, [self.active])):
            executor.heard_at += paused_s
        if self._in_flight:
            self._moved_at = self._age_start(self._in_flight[0]) + paused_s

    def check(self, now: float) -> None:
        """Raises ExecutorLost when the serving executor is gone, silent or too slow."""
        while self.monitor.poll(0):
            self.monitor.recv_multipart()
            self._probes_left, self._probe_at = NUM_PROBES, now
        if self.active is None:
            return
        if self._probes_left and now >= self._probe_at:
            self._probes_left, self._probe_at = self._probes_left - 1, now + PROBE_EVERY_S
            self._send_active(self._beat())  # a beat here means nothing to it; only whether it can be sent matters
        if now - self.active.heard_at > BEAT_TIMEOUT_S:
            raise ExecutorLost(f"no heartbeat for {BEAT_TIMEOUT_S:g} s", EndReason.HEARTBEAT)
        if self._in_flight:
            oldest = self._in_flight[0]
            limit_s = self._budget.limit_s(oldest.num_tokens)
            if now - self._age_start(oldest) > limit_s:
                raise ExecutorLost(f"step {oldest.step_id} takes longer than {limit_s:.1f} s", EndReason.STEP_TIMEOUT)

    @property
    def is_suspect(self) -> bool:
        return self.active is not None and self._probes_left > 0

    def is_stalled(self, now: float) -> bool:
        if self.active is None or not self._in_flight:
            return False
        oldest = self._in_flight[0]
        return now - self._age_start(oldest) > self._budget.stall_s(oldest.num_tokens)

    # ---- small things ------------------------------------------------------------------------------------------

    def _age_start(self, oldest: InFlight) -> float:
        """A step begins when it was sent or, if later, when the one before it ended."""
        return max(oldest.sent_at, self._moved_at)

    def _is_active(self, identity: bytes) -> bool:
        return self.active is not None and self.active.identity == identity

    def _find(self, instance_id: int) -> Executor | None:
        if self.active is not None and self.active.hello.instance_id == instance_id:
            return self.active
        return self._standby.get(instance_id)

    def _beat(self) -> bytes:
        return step_pb2.ToExecutor(beat=step_pb2.Beat(instance_id=self.boot_id)).SerializeToString()

    def _refuse(self, identity: bytes, reason: str, *, fatal: bool) -> None:
        refusal = step_pb2.ToExecutor(refusal=step_pb2.Refusal(reason=reason, fatal=fatal))
        self._send(self.socket, identity, refusal.SerializeToString())

    def _send_active(self, frame: bytes) -> None:
        assert self.active is not None
        try:
            self.socket.send_multipart((self.active.identity, frame), zmq.NOBLOCK)
        except zmq.Again:
            raise ExecutorLost("it does not read its plans", EndReason.NOT_READING) from None
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise ExecutorLost("its connection is gone") from None

    def _send(self, socket: zmq.Socket, identity: bytes, frame: bytes) -> None:
        """To a peer that may be gone or deaf: then nobody misses the frame."""
        try:
            socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise


def _mismatch(what: str, ours: object, theirs: object) -> str:
    return f"{what} mismatch: this scheduler serves {ours!r}, the executor offers {theirs!r}"

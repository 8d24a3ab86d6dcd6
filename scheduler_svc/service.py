"""The scheduler process around the core: one blocking poll loop in the main thread.

    inbox -> submit, cancel -> while the pipeline has room: plan -> send -> results -> commit -> fan out

Knows the core's face and the links' faces; nothing of blocks or of zmq's options. Its laws: every doubt about the
executor has one answer (the epoch ends, the core keeps every request); tokens leave only after commit; the next plan
leaves before the tokens of the last one do.
"""

import gc
import logging
import time
from collections.abc import Callable

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.block_watch import BlockWatch
from scheduler_svc.core.contract import Geometry, Output
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import ExecutorError, RequestError, Unavailable
from scheduler_svc.links.executors import ExecutorLink
from scheduler_svc.links.frontends import (
    BlocksWatched,
    Cancelled,
    FrontendLink,
    LoadAsked,
    SessionEnded,
    SnapshotAsked,
    StoryAsked,
    Submitted,
)
from scheduler_svc.links.messages import is_empty, load_from_stats, request_from_submit
from scheduler_svc.links.pauses import Pauses
from scheduler_svc.links.transport import BadFrames, Poller
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.request_traces import RequestTraces, Untraced
from scheduler_svc.snapshot import Snapshots, story_reply

logger = logging.getLogger(__name__)

TICK_S = 0.1
# When something waits for a moment nobody will announce: room in a socket, the fate of a connection.
SHORT_TICK_S = 0.01
METRICS_EVERY_S = 1.0
PULSE_EVERY_S = 0.25
RETRY_WHILE_DRAINING_S = 1.0


class Service:
    def __init__(
        self,
        core: Scheduler,
        frontends: FrontendLink,
        executors: ExecutorLink,
        *,
        pipeline_depth: int,
        drain_timeout_s: float,
        metrics: SchedulerMetrics,
        bad_frames: BadFrames,
        pulse: Callable[[], None] | None = None,
        after_turn: Callable[[], None] | None = None,
        traces: RequestTraces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._frontends = frontends
        self._executors = executors
        self._depth = pipeline_depth
        self._drain_timeout_s = drain_timeout_s
        self._metrics = metrics
        self._bad_frames = bad_frames
        self._pulse = pulse
        self._after_turn = after_turn
        self._traces = traces or Untraced()
        self._clock = clock
        self._blocks = BlockWatch(core, frontends.send_block_news)
        self._poller = Poller(frontends.socket, executors.socket, executors.beat_socket, executors.monitor)
        self._outputs: list[Output] = []
        # Choices that their frontend ended by handle: a stop string matched. (session, handle)
        self._stopped_by_text: set[tuple[int, int]] = set()
        self._pauses = Pauses(TICK_S)
        self._plan_s = 0.0
        self._snapshots = Snapshots(core, frontends, executors, metrics, clock())
        self._metrics_at = 0.0
        self._pulse_at = 0.0
        self._was_idle = True
        self._stop_asked = False
        self._drain_until: float | None = None

    def stop(self) -> None:
        """Drain, then end. Safe in a signal handler; a second call does not wait for anybody."""
        self._drain_timeout_s = 0.0 if self._stop_asked else self._drain_timeout_s
        self._stop_asked = True

    @property
    def is_draining(self) -> bool:
        return self._drain_until is not None

    def run(self) -> None:
        # What is there now stays; the collector need not walk it again in the middle of a step.
        gc.collect()
        gc.freeze()
        try:
            while self.turn():
                pass
        finally:
            # Also after a bug: what led to it is what a journal is for.
            if self._after_turn is not None:
                self._after_turn()
            self._traces.close(self._clock())

    def turn(self) -> bool:
        """Waits until something arrives or a tick passes, and acts on it. False: drained, nothing is left to do."""
        waits = self._frontends.has_pending or self._executors.is_suspect or self._stop_asked
        self._poller.wait(SHORT_TICK_S if waits else TICK_S)
        now = self._clock()
        if paused_s := self._pauses.look(now):
            logger.warning("stood_still seconds=%.1f", paused_s)
            self._executors.excuse(paused_s)
            self._frontends.excuse(paused_s)
        self._hear_frontends(now)
        self._hear_executors(now)
        self._begin_epoch(now)
        # A full pipeline plans nothing until a step has ended; deadlines do not wait for it.
        self._core.expire(now)
        self._plan(now)
        self._fan_out(now)
        self._housekeeping(now)
        if self._after_turn is not None:
            self._after_turn()
        return not self._is_drained(now)

    # ---- frontends ---------------------------------------------------------------------------------------------

    def _hear_frontends(self, now: float) -> None:
        for event in self._frontends.receive(now):
            match event:
                case Submitted():
                    self._submit(event, now)
                case Cancelled(request_id=str() as request_id):
                    self._core.cancel_request(request_id)
                case Cancelled(handle=int() as handle):
                    if self._core.cancel_handle(event.session, handle):
                        self._stopped_by_text.add((event.session, handle))
                case LoadAsked():
                    stats = self._core.stats()
                    welcome, num_frontends = self._frontends.welcome, self._frontends.num_sessions
                    load = load_from_stats(stats, event.query_id, welcome, num_frontends)
                    self._frontends.send_load(event.session, load)
                case BlocksWatched():
                    self._blocks.asked(event.session, event.watch)
                case SnapshotAsked():
                    reply = self._snapshots.reply(event.query_id, now, draining=self.is_draining)
                    self._frontends.send_snapshot(event.session, reply)
                case StoryAsked():
                    lines = self._core.story(event.request_id)
                    self._frontends.send_story(event.session, story_reply(event.query_id, lines))
                case SessionEnded():
                    self._end_session(event, now)
        for ended in self._frontends.expire(now):
            self._end_session(ended, now)

    def _submit(self, event: Submitted, now: float) -> None:
        submit = event.submit
        try:
            if self.is_draining:
                raise Unavailable("the scheduler is shutting down", retry_after_s=RETRY_WHILE_DRAINING_S)
            vocab_size = self._frontends.welcome.geometry.vocab_size or None
            request = request_from_submit(submit, event.session, now, vocab_size)
            self._core.submit(request, now)
        except RequestError as error:
            self._frontends.reject(event.session, submit.handle, error)
        else:
            if not submit.delivered:
                self._metrics.submitted(event.session, submit.handle, submit.num_choices, now)
            self._traces.submitted(event.session, submit, now)

    def _end_session(self, ended: SessionEnded, now: float) -> None:
        num_released = self._core.drop_session(ended.session)
        self._traces.session_ended(ended.session, now)
        self._metrics.session_ended(ended.session)
        self._blocks.session_ended(ended.session)
        self._stopped_by_text = {key for key in self._stopped_by_text if key[0] != ended.session}
        if num_released:
            logger.info("requests_released session=%d count=%d reason=%r", ended.session, num_released, ended.reason)

    # ---- the executor ------------------------------------------------------------------------------------------

    def _hear_executors(self, now: float) -> None:
        try:
            self._executors.receive_beats(now)
            for result in self._executors.receive(now):
                self._commit(result, now)
            self._executors.check(now)
        except ExecutorError as error:
            self._end_epoch(error, now)

    def _commit(self, result: step_pb2.StepResult, now: float) -> None:
        began = time.perf_counter()
        output = self._core.commit(result, now)
        self._outputs.append(output)
        self._traces.committed(result, now)
        commit_s = time.perf_counter() - began
        self._metrics.step_done((self._plan_s, commit_s, result.forward_us, now, len(output.position)))
        self._plan_s = 0.0

    def _end_epoch(self, error: ExecutorError, now: float) -> None:
        self._traces.epoch_ended(self._executors.epoch, now)
        self._executors.end_epoch(str(error), now)
        self._core.executor_lost()
        self._metrics.epoch_ended(error.reason)

    def _begin_epoch(self, now: float) -> None:
        executor = self._executors.next_executor(now)
        if executor is None:
            return
        geometry = Geometry.from_wire(executor.hello.geometry)
        self._core.reset(geometry, self._executors.boot_id, self._executors.epoch + 1)
        try:
            self._executors.start_epoch(executor, now)
        except ExecutorError as error:
            self._end_epoch(error, now)

    def _plan(self, now: float) -> None:
        try:
            while self._core.num_in_flight < self._depth:
                began = time.perf_counter()
                plan = self._core.plan(now)
                self._plan_s += time.perf_counter() - began
                if plan is None:
                    return
                self._traces.planned(plan, now)
                self._metrics.plan_sent(self._executors.send_plan(plan, now))
        except ExecutorError as error:
            self._end_epoch(error, now)

    # ---- what goes out -----------------------------------------------------------------------------------------

    def _fan_out(self, now: float) -> None:
        """One frame per step per frontend."""
        outputs, self._outputs = [*self._outputs, self._core.take_output()], []
        for output in outputs:
            if is_empty(output):
                continue
            self._frontends.send_output(output)
            if self._metrics.awaited:
                self._metrics.output(output, now)
            for finished in output.finished:
                key = (finished.session, finished.handle)
                by_stop_string = key in self._stopped_by_text
                self._metrics.finished(finished, by_stop_string=by_stop_string)
                self._traces.finished(finished, now, by_stop_string=by_stop_string)
                self._stopped_by_text.discard(key)
        self._blocks.fan_out()
        if self._frontends.has_pending:
            self._frontends.flush()

    def _publish_truth(self, now: float) -> None:
        """Every change of what a frontend may count on is pushed to all of them."""
        executors, welcome = self._executors, self._frontends.welcome
        truth = (executors.active is not None, executors.epoch, executors.is_stalled(now))
        if truth == (welcome.executor_ready, welcome.epoch, welcome.stalled):
            return
        welcome.executor_ready, welcome.epoch, welcome.stalled = truth
        if executors.active is not None:
            hello = executors.active.hello
            welcome.geometry.CopyFrom(hello.geometry)
            welcome.model.CopyFrom(hello.model)
            welcome.device, welcome.backend = hello.device, hello.backend
        self._frontends.publish()
        self._metrics.executor(ready=truth[0], epoch=truth[1], geometry=welcome.geometry)

    def _housekeeping(self, now: float) -> None:
        self._publish_truth(now)
        is_idle = self._core.is_idle
        if is_idle and not self._was_idle:
            self._core.check()
        if self._pulse is not None and now >= self._pulse_at:
            self._pulse_at = now + PULSE_EVERY_S
            self._pulse()
        if now >= self._metrics_at or (is_idle and not self._was_idle):
            self._metrics_at = now + METRICS_EVERY_S
            self._metrics.update(self._core.stats(), now)
            self._metrics.update_links(
                sessions=self._frontends.num_sessions,
                standby=self._executors.num_standby,
                stale=self._executors.num_stale,
                bad_frames=self._bad_frames.counts,
            )
        self._was_idle = is_idle

    def _is_drained(self, now: float) -> bool:
        if not self._stop_asked:
            return False
        if self._drain_until is None:
            self._drain_until = now + self._drain_timeout_s
            logger.info("drain_began timeout_s=%g", self._drain_timeout_s)
        if self._core.is_idle and not self._frontends.has_pending:
            logger.info("drain_ended left=0")
            return True
        if now >= min(self._drain_until, now + self._drain_timeout_s):
            logger.warning("drain_ended left=%d", self._core.stats().num_running + self._core.stats().num_waiting)
            return True
        return False

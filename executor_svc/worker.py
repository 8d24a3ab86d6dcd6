"""The loop: receive a plan, apply, copy, batch, launch; and answer each step when it is done, oldest first.

    plan k+1  ──apply──launch─────────────────apply──launch──
    step k    ─────────running──────────done──answer─────────      the device goes from step k to k+1 without waiting

A backend that computes at once has answered step k before plan k+1 is looked at. A step that scores a long prompt runs
in passes. A step with rows whose next draw depends on tokens that only the device knows waits for these.

The worker decides nothing and knows no transport: a link hands it epochs and, strictly in order, plans. A plan that
breaks the contract and nonsense from the device end the epoch with a fault. Any other exception, every error of the
device among them, leaves serve() after a last fault: the process ends and the scheduler recovers by epoch. An error of
a step that was launched is raised when the step is waited for.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from executor_svc.backends.base import Backend, Pending
from executor_svc.batch import build_batch
from executor_svc.constraints import Grammars
from executor_svc.errors import EpochFault
from executor_svc.protocol import EpochStarted
from executor_svc.rows import Due, RowTable, Work
from executor_svc.scoring import passes
from protos.stepwire.wire.v1 import step_pb2

# Steps launched at once: one that runs, one behind it. The scheduler keeps no more plans on their way.
DEPTH = 2
# While a step runs: how long to listen for a plan before looking at the step again.
GLANCE_S = 0.001


class Link(Protocol):
    def receive(self, timeout_s: float | None = None) -> EpochStarted | step_pb2.StepPlan | None:
        """The next thing to do, in order. None: nothing within `timeout_s`; where that is None, the end."""

    def send_result(self, result: step_pb2.StepResult) -> None: ...

    def drop_result(self) -> None:
        """Instead of send_result, for a step whose epoch is over."""

    def fault(self, message: str, kind: "step_pb2.FaultKind") -> None:
        """Instead of send_result; ends the epoch from this side: no plan comes until the next one begins."""


@dataclass(slots=True)
class Flight:
    """A step that was launched. Its result lacks what the device has yet to say."""

    plan: step_pb2.StepPlan
    result: step_pb2.StepResult
    started_ns: int
    parts: list[tuple[Due, Pending]] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(pending.is_done() for _, pending in self.parts)


class Worker:
    def __init__(
        self,
        backend: Backend,
        grammars: Grammars | None = None,
        observe: Callable[[step_pb2.StepPlan, step_pb2.StepResult], None] = lambda _plan, _result: None,
        on_reset: Callable[[], None] = lambda: None,
    ):
        """grammars: None refuses every constraint. `observe` hears of every plan and its result once that is on its
        way, `on_reset` of the begin of every epoch."""
        self.rows = RowTable(backend.geometry, grammars)
        self._backend = backend
        self._observe = observe
        self._on_reset = on_reset
        self._flights: deque[Flight] = deque()
        self._landed_ns = 0

    def serve(self, link: Link) -> None:
        while True:
            event = link.receive(GLANCE_S if self._flights else None)
            if event is None and not self._flights:
                return
            try:
                if isinstance(event, EpochStarted):
                    self._drop_flights(link)
                    self.reset()
                elif event is not None:
                    self._launch_next(link, event)
                while self._flights and (len(self._flights) == DEPTH or self._flights[0].is_done()):
                    self._answer_oldest(link)
            except EpochFault as fault:
                link.fault(str(fault), fault.kind)
                self._drop_flights(link)
            except Exception as error:
                # Whatever it is, this process ends by it. The scheduler need not wait to find out.
                link.fault(f"the process ends: {type(error).__name__}", step_pb2.FAULT_KIND_CRASH)
                raise

    def reset(self) -> None:
        self.rows.reset()
        self._backend.reset()
        self._on_reset()

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        """One step alone, from its plan to its result."""
        started_ns = time.perf_counter_ns()
        return self._land(self._launch(plan, self.rows.apply(plan), started_ns))

    def _launch_next(self, link: Link, plan: step_pb2.StepPlan) -> None:
        started_ns = time.perf_counter_ns()
        work = self.rows.apply(plan)
        if self.rows.needs_drawn(work):
            while self._flights:
                self._answer_oldest(link)
        self._flights.append(self._launch(plan, work, started_ns))

    def _launch(self, plan: step_pb2.StepPlan, work: Work, started_ns: int) -> Flight:
        if work.copy.size:
            self._backend.copy_blocks(work.copy)
        result = step_pb2.StepResult(boot_id=plan.boot_id, epoch=plan.epoch, step_id=plan.step_id)
        flight = Flight(plan, result, started_ns)
        for part in passes(self.rows, work) if work.rows.size else ():
            pending = self._backend.launch(build_batch(self.rows, part))
            flight.parts.append((self.rows.advance(part), pending))
        result.num_rows, result.num_stored_tokens = self.rows.digest()
        return flight

    def _answer_oldest(self, link: Link) -> None:
        flight = self._flights.popleft()
        result = self._land(flight)
        link.send_result(result)
        self._observe(flight.plan, result)

    def _land(self, flight: Flight) -> step_pb2.StepResult:
        result = flight.result
        for due, pending in flight.parts:
            output = pending.wait()
            self.rows.settle(due, output.token_ids)
            result.token_ids += output.token_ids.astype("<i4", copy=False).tobytes()
            result.logprobs.extend(output.logprobs)
            result.prompt_logprobs.extend(output.prompt_logprobs)
            result.faults.extend(output.faults)
        # A step behind another has begun when that one was done.
        now_ns = time.perf_counter_ns()
        began_ns, self._landed_ns = max(flight.started_ns, self._landed_ns), now_ns
        result.forward_us = min((now_ns - began_ns) // 1000, 2**32 - 1)
        return result

    def _drop_flights(self, link: Link) -> None:
        """Their epoch is over. They are waited for all the same: what comes next must find the device working."""
        while self._flights:
            for _, pending in self._flights.popleft().parts:
                with contextlib.suppress(EpochFault):
                    pending.wait()
            link.drop_result()

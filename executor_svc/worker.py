"""The loop: receive a plan, apply, copy, batch, run, append, answer. A step that scores a long prompt runs in passes.

The worker decides nothing and knows no transport: a link hands it epochs and, strictly in order, plans. A plan that
breaks the contract and nonsense from the device end the epoch with a fault. Any other exception, every error of the
device among them, leaves serve() after a last fault: the process ends and the scheduler recovers by epoch.
"""

import time
from collections.abc import Callable
from typing import Protocol

from executor_svc.backends.base import Backend
from executor_svc.batch import build_batch
from executor_svc.constraints import Grammars
from executor_svc.errors import EpochFault
from executor_svc.protocol import EpochStarted
from executor_svc.rows import RowTable
from executor_svc.scoring import passes
from protos.stepwire.wire.v1 import step_pb2


class Link(Protocol):
    def receive(self) -> EpochStarted | step_pb2.StepPlan | None:
        """The next thing to do, in order; None is the end."""

    def send_result(self, result: step_pb2.StepResult) -> None: ...

    def fault(self, message: str, kind: "step_pb2.FaultKind") -> None:
        """Ends the epoch from this side: no plan comes until the next one begins."""


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

    def serve(self, link: Link) -> None:
        while (event := link.receive()) is not None:
            if isinstance(event, EpochStarted):
                self.reset()
                continue
            try:
                result = self.execute(event)
            except EpochFault as fault:
                link.fault(str(fault), fault.kind)
            except Exception as error:
                # Whatever it is, this process ends by it. The scheduler need not wait to find out.
                link.fault(f"the process ends: {type(error).__name__}", step_pb2.FAULT_KIND_CRASH)
                raise
            else:
                link.send_result(result)
                self._observe(event, result)

    def reset(self) -> None:
        self.rows.reset()
        self._backend.reset()
        self._on_reset()

    def execute(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        started = time.perf_counter_ns()
        work = self.rows.apply(plan)
        if work.copy.size:
            self._backend.copy_blocks(work.copy)
        result = step_pb2.StepResult(boot_id=plan.boot_id, epoch=plan.epoch, step_id=plan.step_id)
        for part in passes(self.rows, work) if work.rows.size else ():
            output = self._backend.run(build_batch(self.rows, part))
            self.rows.append(part, output.token_ids)
            result.token_ids += output.token_ids.astype("<i4", copy=False).tobytes()
            result.logprobs.extend(output.logprobs)
            result.prompt_logprobs.extend(output.prompt_logprobs)
            result.faults.extend(output.faults)
        result.num_rows, result.num_stored_tokens = self.rows.digest()
        result.forward_us = min((time.perf_counter_ns() - started) // 1000, 2**32 - 1)
        return result

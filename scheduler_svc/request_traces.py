"""One request's spans, as the scheduler saw it: the queue, prefill, decode, and the waits after a preemption or the
loss of an executor.

Made when the request ends, from the transitions that the core wrote down anyway. Beside them it keeps when the steps
ran in which anything but decoding happened: a steady decode step leaves nothing here. Times are those of the service's
clock until a span is made.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.core.contract import Cause, Finished
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.tracing import Tracing, end

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_STEPS = 1 << 16
MAX_EPOCHS = 256

# (step_id, choice, what happened, numbers), as the core tells it.
Transition = tuple[int, int, str, tuple[int, ...]]
# (epoch, step_id)
StepKey = tuple[int, int]


@dataclass(slots=True)
class StepTimes:
    planned_s: float
    committed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class Traced:
    """A request that somebody traces, while it lives."""

    request_id: str
    span: "Span"
    traceparent: str
    # What to add to the service's clock for the time of day.
    offset_s: float
    began_s: float
    # Choices that have not ended.
    open: set[int]
    # When each of its sequences was seated: (choice, epoch, step_id), in order.
    seats: list[tuple[int, int, int]] = field(default_factory=list)
    ended_s: dict[int, float] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    finish_reason: str = ""


class RequestTraces:
    def __init__(
        self,
        tracing: Tracing,
        core: Scheduler,
        offset: Callable[[], float] = lambda: time.time() - time.monotonic(),
    ) -> None:
        self._tracing = tracing
        self._core = core
        self._offset = offset
        self._by_id: dict[str, Traced] = {}
        self._by_handle: dict[tuple[int, int], tuple[Traced, int]] = {}
        self._steps: OrderedDict[StepKey, StepTimes] = OrderedDict()
        self._lost_at: OrderedDict[int, float] = OrderedDict()
        # Somebody caught up in the step before: this one may be where it ends.
        self._is_catching_up = False

    def submitted(self, session: int, submit: session_pb2.Submit, now: float) -> None:
        """The core has taken it."""
        choices = {i for i in range(submit.num_choices) if not submit.delivered or not submit.delivered[i].finished}
        if not submit.traceparent or not choices:
            return
        offset_s = self._offset()
        attributes = {
            "stepwire.num_prompt_tokens": len(submit.prompt_token_ids) // 4,
            "stepwire.num_choices": submit.num_choices,
            "stepwire.is_resumed": bool(submit.delivered),
        }
        span = self._tracing.begin("schedule", parent=submit.traceparent, at_s=now + offset_s, attributes=attributes)
        traceparent = self._tracing.traceparent(span)
        if not traceparent:
            return
        traced = Traced(submit.request_id, span, traceparent, offset_s, now, choices)
        self._by_id[submit.request_id] = traced
        for choice in choices:
            self._by_handle[session, submit.handle + choice] = traced, choice

    def planned(self, plan: step_pb2.StepPlan, now: float) -> None:
        """Writes into the plan which of its rows are traced."""
        catches_up = bool(plan.admit or plan.prefill)
        if catches_up or plan.release or self._is_catching_up:
            self._steps[plan.epoch, plan.step_id] = StepTimes(now)
            if len(self._steps) > MAX_STEPS:
                self._steps.popitem(last=False)
        self._is_catching_up = catches_up
        if not self._by_id:
            return
        for admit in plan.admit:
            request_id, choice = self._core.seated(admit.row)
            traced = self._by_id.get(request_id)
            if traced is not None:
                admit.traceparent = traced.traceparent
                traced.seats.append((choice, plan.epoch, plan.step_id))

    def committed(self, result: step_pb2.StepResult, now: float) -> None:
        times = self._steps.get((result.epoch, result.step_id))
        if times is not None:
            times.committed_s = now

    def epoch_ended(self, epoch: int, now: float) -> None:
        self._lost_at[epoch] = now
        self._is_catching_up = False
        if len(self._lost_at) > MAX_EPOCHS:
            self._lost_at.popitem(last=False)

    def finished(self, finished: Finished, now: float, *, by_stop_string: bool) -> None:
        traced, choice = self._by_handle.pop((finished.session, finished.handle), (None, 0))
        if traced is None:
            return
        is_stop = by_stop_string and finished.cause == Cause.CANCELLED
        traced.finish_reason = (Cause.STOP if is_stop else finished.cause).name.lower()
        traced.ended_s[choice] = now
        traced.totals["stepwire.num_cached_tokens"] += finished.num_cached_tokens
        traced.totals["stepwire.num_output_tokens"] += finished.num_output_tokens
        traced.totals["stepwire.num_preemptions"] += finished.num_preemptions
        traced.totals["stepwire.num_resumes"] += finished.num_resumes
        traced.open.discard(choice)
        if not traced.open:
            self._close(traced, now, "failed" if finished.cause == Cause.FAILED else "")

    def session_ended(self, session: int, now: float) -> None:
        gone = {key: entry[0] for key, entry in self._by_handle.items() if key[0] == session}
        for key in gone:
            del self._by_handle[key]
        for traced in {id(traced): traced for traced in gone.values()}.values():
            self._close(traced, now, "the frontend is gone")

    def close(self, now: float) -> None:
        """The scheduler ends."""
        for traced in list(self._by_id.values()):
            self._close(traced, now, "the scheduler ended")
        self._by_handle.clear()

    def _close(self, traced: Traced, now: float, error: str) -> None:
        # Another request may have taken the name since.
        if self._by_id.get(traced.request_id) is traced:
            del self._by_id[traced.request_id]
        story = self._core.transitions(traced.request_id)
        for choice in sorted({choice for choice, _, _ in traced.seats} | traced.ended_s.keys() | traced.open):
            mine = [entry for entry in story if entry[1] == choice]
            seats = [(epoch, step_id) for c, epoch, step_id in traced.seats if c == choice]
            ended_s = traced.ended_s.get(choice, now)
            for phase in phases(mine, seats, self._steps, self._lost_at, traced.began_s, ended_s):
                self._tracing.add(
                    phase.name,
                    traced.span,
                    phase.began_s + traced.offset_s,
                    phase.ended_s + traced.offset_s,
                    {"stepwire.choice": choice, **phase.attributes},
                )
        for name, total in traced.totals.items():
            traced.span.set_attribute(name, total)
        if traced.finish_reason:
            traced.span.set_attribute("stepwire.finish_reason", traced.finish_reason)
        end(traced.span, at_s=now + traced.offset_s, error=error)


class Untraced:
    """In the place of RequestTraces where nobody traces: hears of everything, keeps nothing."""

    def submitted(self, session: int, submit: session_pb2.Submit, now: float) -> None: ...

    def planned(self, plan: step_pb2.StepPlan, now: float) -> None: ...

    def committed(self, result: step_pb2.StepResult, now: float) -> None: ...

    def epoch_ended(self, epoch: int, now: float) -> None: ...

    def finished(self, finished: Finished, now: float, *, by_stop_string: bool) -> None: ...

    def session_ended(self, session: int, now: float) -> None: ...

    def close(self, now: float) -> None: ...


def phases(
    story: Iterable[Transition],
    seats: list[StepKey],
    steps: Mapping[StepKey, StepTimes],
    lost_at: Mapping[int, float],
    began_s: float,
    ended_s: float,
) -> Iterator[Phase]:
    """What one sequence did from its beginning to its end, without gaps, in order.

    `story`: its transitions; only the last ones where there were many. What happened before those, and what falls into
    a step whose time is not known, is told in one piece with what came after it.
    """
    story = list(story)
    num_admissions = sum(event == "admitted to row" for _, _, event, _ in story)
    mine = iter(seats[len(seats) - num_admissions :] if num_admissions <= len(seats) else ())
    name, since_s, attributes = "queue", began_s, dict[str, int]()
    epoch = 0
    for step_id, _, event, numbers in story:
        next_name, next_attributes = name, dict[str, int]()
        at_s: float | None = None
        match event:
            case "admitted to row":
                epoch, step_id = next(mine, (0, 0))
                at_s = _planned(steps, epoch, step_id)
                row, num_cached, num_known = numbers
                next_name = "prefill"
                next_attributes = {
                    "stepwire.row": row,
                    "stepwire.epoch": epoch,
                    "stepwire.num_cached_tokens": num_cached,
                    "stepwire.num_known_tokens": num_known,
                }
            case "caught up":
                times = steps.get((epoch, step_id))
                at_s = times.committed_s if times is not None else None
                next_name, next_attributes = "decode", attributes
            case "preempted from row":
                at_s, next_name = _planned(steps, epoch, step_id), "preempted"
            case "lost its executor in row":
                at_s, next_name = lost_at.get(epoch), "executor lost"
        if at_s is not None:
            yield Phase(name, since_s, max(at_s, since_s), attributes)
            name, since_s, attributes = next_name, max(at_s, since_s), next_attributes
    yield Phase(name, since_s, max(ended_s, since_s), attributes)


def _planned(steps: Mapping[StepKey, StepTimes], epoch: int, step_id: int) -> float | None:
    times = steps.get((epoch, step_id))
    return times.planned_s if times is not None else None

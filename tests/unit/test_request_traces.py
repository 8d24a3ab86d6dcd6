"""The phases of a sequence from what the core wrote down: without gaps, in order, whatever is not known."""

import itertools

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.core.contract import Geometry, Limits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.request_traces import RequestTraces, StepTimes, phases
from scheduler_svc.tracing import Tracing
from tests.sim.hash_exec import HashExec
from tests.unit.core.test_policy_and_models import request

STEPS = {
    (1, 1): StepTimes(1.0, 2.0),
    (1, 2): StepTimes(2.0, 3.0),
    (1, 5): StepTimes(5.0, 6.0),
    (1, 7): StepTimes(7.0, 8.0),
    (1, 8): StepTimes(8.0),  # its executor was lost before the result came
    (2, 1): StepTimes(20.0, 21.0),
}
SUBMITTED = (0, 0, "submitted", (9,))
FINISHED = (0, 0, "finished LENGTH", (4,))


def admitted(step_id: int, cached: int = 0, known: int = 9):
    return (step_id, 0, "admitted to row", (3, cached, known))


def told(story, seats, steps=STEPS, lost_at=None, ended_s=30.0):
    made = list(phases(story, seats, steps, lost_at or {}, 0.5, ended_s))
    assert made[0].began_s == 0.5
    assert made[-1].ended_s == ended_s
    for before, after in itertools.pairwise(made):
        assert before.ended_s == after.began_s
    return [(phase.name, phase.began_s) for phase in made], made


def test_a_plain_life():
    story = [SUBMITTED, admitted(1, cached=4), (2, 0, "caught up", (9,)), (5, 0, "leaves row", (3,)), FINISHED]
    names, made = told(story, [(1, 1)])
    assert names == [("queue", 0.5), ("prefill", 1.0), ("decode", 3.0)]
    assert made[1].attributes == {
        "stepwire.row": 3,
        "stepwire.epoch": 1,
        "stepwire.num_cached_tokens": 4,
        "stepwire.num_known_tokens": 9,
    }


def test_a_request_that_never_ran():
    assert told([SUBMITTED, (0, 0, "finished CANCELLED", (0,))], [])[0] == [("queue", 0.5)]


def test_a_preemption_and_the_loss_of_an_executor():
    story = [
        *(SUBMITTED, admitted(1), (1, 0, "caught up", (9,)), (5, 0, "preempted from row", (3,))),
        *(admitted(7, known=12), (8, 0, "caught up", (12,)), (9, 0, "lost its executor in row", (3,))),
        *(admitted(1, known=13), (1, 0, "caught up", (13,)), FINISHED),
    ]
    names, _ = told(story, [(1, 1), (1, 7), (2, 1)], lost_at={1: 9.0})
    assert names == [
        *(("queue", 0.5), ("prefill", 1.0), ("decode", 2.0), ("preempted", 5.0), ("prefill", 7.0)),
        *(("executor lost", 9.0), ("prefill", 20.0), ("decode", 21.0)),
    ]


def test_only_the_end_of_a_long_story_is_known():
    story = [(5, 0, "preempted from row", (3,)), admitted(7, known=12), (7, 0, "caught up", (12,)), FINISHED]
    names, _ = told(story, [(1, 1), (1, 2), (1, 7)])
    assert names[-2:] == [("prefill", 7.0), ("decode", 8.0)]


def test_a_step_whose_time_is_forgotten_is_told_with_what_follows():
    story = [SUBMITTED, admitted(1), (2, 0, "caught up", (9,)), FINISHED]
    assert told(story, [(1, 1)], steps={(1, 1): StepTimes(1.0, 2.0)})[0] == [("queue", 0.5), ("prefill", 1.0)]
    assert told(story, [(1, 1)], steps={})[0] == [("queue", 0.5)]


def test_another_request_took_the_name():
    story = [SUBMITTED, admitted(1), admitted(2), FINISHED]
    assert told(story, [(1, 1)])[0] == [("queue", 0.5)]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_every_preemption_of_the_core_is_a_span():
    shape = Geometry(
        num_blocks=12, block_size=4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, vocab_size=50
    )
    core, executor = Scheduler(Limits()), HashExec(shape, 1, 1)
    core.reset(shape, 1, 1)
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "scheduler")
    traces = RequestTraces(tracing, core, offset=lambda: 1000.0)
    now, ends = 0.0, []

    def run() -> None:
        nonlocal now
        while (plan := core.plan(now)) is not None:
            traces.planned(plan, now)
            now += 1.0
            result = executor.run(plan)
            output = core.commit(result, now)
            traces.committed(result, now)
            for end in output.finished:
                traces.finished(end, now, by_stop_string=False)
                ends.append(end)

    for number in range(60):  # short outputs: the core learns to expect no others
        core.submit(request(number), now)
        run()
    for number in range(60, 64):
        core.submit(request(number, max_tokens=30), now)
        submit = session_pb2.Submit(request_id=f"r{number}", handle=number * 100, num_choices=1, traceparent=PARENT)
        traces.submitted(0, submit, now)
    run()
    tracing.close()
    num_preemptions = sum(end.num_preemptions for end in ends)
    assert num_preemptions > 0
    spans = exporter.get_finished_spans()
    names = [span.name for span in spans]
    assert {name: names.count(name) for name in names} == {
        **{"schedule": 4, "queue": 4, "preempted": num_preemptions},
        **{"prefill": 4 + num_preemptions, "decode": 4 + num_preemptions},
    }
    for root in (span for span in spans if span.name == "schedule"):
        mine = sorted((s for s in spans if s.parent.span_id == root.context.span_id), key=lambda s: s.start_time)
        assert (mine[0].start_time, mine[-1].end_time) == (root.start_time, root.end_time)
        assert [s.end_time for s in mine[:-1]] == [s.start_time for s in mine[1:]]

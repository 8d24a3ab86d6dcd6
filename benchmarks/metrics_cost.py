"""What the scheduler's metrics cost: the same steady decode with and without them, step by step in turn.

    python -m benchmarks.metrics_cost --rows 64 256 1024
    PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) python -m benchmarks.metrics_cost     # into files, as under `stepwire serve`

A step here is what the service does for one, sockets left out: read the result, commit, plan, write the plan, write
each frontend's frame. CPU time of the thread. Of three steps one has metrics and two have none: those two differ by
nothing, and how far apart their medians are says what a difference means. Totals and histograms, told every second or
two, are timed by themselves and shared among the steps of that time, at STEP_S a step. One JSON object a line.
"""

import argparse
import gc
import json
import random
import statistics
import time

from prometheus_client import CollectorRegistry

from benchmarks.scheduler import Bench, geometry
from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.links.messages import frames
from scheduler_svc.metrics import HISTOGRAMS_EVERY_S, SchedulerMetrics
from scheduler_svc.service import METRICS_EVERY_S

SEED = 1
# A fast one: the more steps a second, the less each pays for the totals.
STEP_S = 0.005
TOTALS_EVERY = round(HISTOGRAMS_EVERY_S / STEP_S)


class Steps(Bench):
    """Steady decode as the service runs it."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(geometry(num_rows, num_blocks=num_rows * 400))
        for i in range(num_rows):
            self.submit(self.random_prompt(100 + i % 16), 20_000)
        while self.scheduler.stats().num_waiting or self._in_flight[-1].prefill:
            self.step()
        self._metrics = SchedulerMetrics(CollectorRegistry())
        self._steps_done = 0
        # Microseconds of each telling of totals.
        self.totals_us: list[float] = []

    def one(self, *, measured: bool) -> float:
        """Microseconds of a step."""
        metrics = self._metrics if measured else None
        data = self._result()
        self._steps_done += 1
        now = self._steps_done * STEP_S
        began = time.thread_time_ns()
        result = step_pb2.StepResult.FromString(data)
        output = self.scheduler.commit(result, now)
        if metrics is not None:
            metrics.step_done((30e-6, 20e-6, result.forward_us, now, len(output.position)))
        plan = self.scheduler.plan(now)
        assert plan is not None
        size = len(plan.SerializeToString())
        if metrics is not None:
            metrics.plan_sent(size)
        for _ in frames(output):
            pass
        if metrics is not None and metrics.awaited:
            metrics.output(output, now)
        took_us = (time.thread_time_ns() - began) / 1e3
        self._in_flight.append(plan)
        return took_us

    def tell_totals(self) -> None:
        now = self._steps_done * STEP_S
        began = time.thread_time_ns()
        for _ in range(round(HISTOGRAMS_EVERY_S / METRICS_EVERY_S)):
            self._metrics.update(self.scheduler.stats(), now)
        self.totals_us.append((time.thread_time_ns() - began) / 1e3)

    def _result(self) -> bytes:
        """What an executor would answer to the oldest plan in flight, as bytes."""
        plan = self._in_flight.pop(0)
        step = self.scheduler._epoch.in_flight[0]  # type: ignore[union-attr]
        return step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=self._rng.integers(0, 40_000, len(step.roster.rows)).astype("<i4").tobytes(),
            forward_us=5000,
            num_rows=step.num_rows,
            num_stored_tokens=step.num_stored,
        ).SerializeToString()


def compare(num_rows: int, num_rounds: int) -> dict[str, object]:
    """`num_rounds` times the steps between two tellings of totals, all of them with metrics as far as those know."""
    steps = Steps(num_rows)
    times: tuple[list[float], ...] = ([], [], [])
    order, draw = [0, 1, 2], random.Random(SEED)
    gc.collect()
    gc.freeze()
    for _ in range(num_rounds):
        for _ in range(TOTALS_EVERY // 2):
            draw.shuffle(order)
            for kind in order:
                # Two of each in a row: the first one meets a processor that has just done the other kind.
                steps.one(measured=kind == 0)
                times[kind].append(steps.one(measured=kind == 0))
        steps.tell_totals()
    with_metrics, without, again = (statistics.median(values) for values in times)
    base = (without + again) / 2
    totals = statistics.mean(steps.totals_us) / TOTALS_EVERY
    return {
        "rows": num_rows,
        "without_us": round(base, 2),
        "with_us": round(with_metrics + totals, 2),
        "of_which_totals_us": round(totals, 2),
        "cost_percent": round(100 * ((with_metrics + totals) / base - 1), 2),
        "noise_percent": round(100 * abs(without / again - 1), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduler's metrics cost.")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    for num_rows in args.rows:
        print(json.dumps(compare(num_rows, args.rounds)), flush=True)


if __name__ == "__main__":
    main()

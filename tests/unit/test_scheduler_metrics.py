"""What the scheduler counts: steps are told in bulk, and come out as if each had been told by itself."""

import random

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram

from scheduler_svc.core.contract import Output, Stats
from scheduler_svc.errors import EndReason
from scheduler_svc.metrics import SchedulerMetrics, WeightedHistogram

SEED = 11
IDLE = Stats(*([0] * 12))
BUSY = Stats(1, *([0] * 11))


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return SchedulerMetrics(registry)


def output(*positions: int) -> Output:
    count = len(positions)
    zeros = np.zeros(count, np.int32)
    return Output(zeros, np.arange(count, dtype=np.uint64), zeros, np.array(positions, np.int32))


def test_many_amounts_are_counted_as_prometheus_would_count_each(registry):
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    bounds = (1.0, 2.0, 4.0)
    ours = WeightedHistogram("ours", "x", buckets=bounds, registry=registry)
    theirs = Histogram("theirs", "x", buckets=bounds, registry=registry)
    amounts = [*bounds, 0.0, 100.0, *(draw.uniform(0, 6) for _ in range(50))]
    counts = [draw.randint(0, 3) for _ in amounts]
    ours.observe_all(np.array(amounts), np.array(counts))
    ours.observe_all(np.array(amounts))
    ours.observe_all(np.array([]))
    for amount, count in zip(amounts, counts, strict=True):
        for _ in range(count + 1):
            theirs.observe(amount)
    for bound in ("1.0", "2.0", "4.0", "+Inf"):
        names = [f"{name}_bucket" for name in ("ours", "theirs")]
        assert len({registry.get_sample_value(name, {"le": bound}) for name in names}) == 1
    assert registry.get_sample_value("ours_sum") == pytest.approx(registry.get_sample_value("theirs_sum"))


def test_steps_reach_histograms_and_the_totals_of_top(metrics, registry):
    metrics.plan_sent(40)
    metrics.step_done((0.001, 0.002, 5000, 10.0, 3))
    assert registry.get_sample_value("stepwire_scheduler_step_seconds_count") == 0
    metrics.flush()
    assert registry.get_sample_value("stepwire_plan_bytes_sum") == 40
    assert registry.get_sample_value("stepwire_scheduler_step_seconds_sum") == pytest.approx(0.003)
    assert registry.get_sample_value("stepwire_executor_step_seconds_sum") == pytest.approx(0.005)
    times = metrics.step_times
    assert (times.num_steps, times.plan_s, times.commit_s, times.device_s) == (1, 0.001, 0.002, 0.005)
    metrics.flush()
    assert registry.get_sample_value("stepwire_scheduler_step_seconds_count") == 1


def gaps(registry) -> tuple[float, float]:
    name = "stepwire_inter_token_seconds"
    return registry.get_sample_value(f"{name}_count"), registry.get_sample_value(f"{name}_sum")


def test_gaps_are_between_commits_and_first_tokens_have_none(metrics, registry):
    metrics.submitted(0, 0, 2, 9.0)
    metrics.step_done((0, 0, 0, 10.0, 2))
    metrics.output(output(0, 0), 10.0)
    assert not metrics.awaited
    metrics.step_done((0, 0, 0, 10.5, 0))  # brought nothing: the gap goes on
    metrics.step_done((0, 0, 0, 11.0, 2))
    metrics.flush()
    assert gaps(registry) == (2, 2.0)
    metrics.step_done((0, 0, 0, 13.0, 1))  # goes on across the telling
    metrics.flush()
    assert gaps(registry) == (3, 4.0)
    assert registry.get_sample_value("stepwire_time_to_first_token_seconds_sum") == 2.0


def test_a_first_token_beside_others_takes_no_part_in_their_gap(metrics, registry):
    metrics.step_done((0, 0, 0, 10.0, 1))
    metrics.submitted(0, 0, 1, 9.0)
    metrics.step_done((0, 0, 0, 11.0, 3))
    metrics.output(output(0, 5, 6), 11.0)
    metrics.flush()
    assert gaps(registry) == (2, 2.0)


def test_the_loss_of_an_executor_is_no_gap(metrics, registry):
    metrics.step_done((0, 0, 0, 10.0, 1))
    metrics.epoch_ended(EndReason.CONNECTION)
    metrics.step_done((0, 0, 0, 20.0, 1))
    metrics.step_done((0, 0, 0, 21.0, 1))
    metrics.flush()
    assert gaps(registry) == (1, 1.0)
    assert registry.get_sample_value("stepwire_scheduler_step_seconds_count") == 3


def test_histograms_are_told_now_and_then_and_at_rest(metrics, registry):
    def counted() -> float | None:
        return registry.get_sample_value("stepwire_scheduler_step_seconds_count")

    metrics.update(BUSY, 0.0)
    metrics.step_done((0, 0, 0, 1.0, 1))
    metrics.update(BUSY, 1.0)
    assert counted() == 0
    metrics.update(BUSY, 2.0)
    assert counted() == 1
    metrics.step_done((0, 0, 0, 1.0, 1))
    metrics.update(IDLE, 2.1)
    assert counted() == 2

"""Figures from times written down by hand."""

import pytest

from scheduler_svc.client.bench_report import headline
from scheduler_svc.client.measure import Record, meets, parse_slo, quantiles, summarise
from scheduler_svc.errors import StartupError


def record(due_s: float, times: list[float], num_output: int | None = None, error: str = "") -> Record:
    made = Record(due_s, num_prompt=10, num_asked=4, error=error)
    made.message_s = times
    made.num_output = len(times) if num_output is None else num_output
    made.end_s = times[-1] if times else due_s
    return made


def test_latencies_of_one_request():
    one = record(1.0, [1.5, 1.6, 1.9])
    assert one.ttft_s == pytest.approx(0.5)
    assert one.gaps_s == pytest.approx([0.1, 0.3])
    assert one.tpot_s == pytest.approx(0.2)
    assert one.e2e_s == pytest.approx(0.9)


def test_a_message_of_several_tokens_is_one_gap():
    one = record(0.0, [1.0, 2.0], num_output=11)
    assert one.gaps_s == [1.0]
    assert one.tpot_s == pytest.approx(0.1)


def test_a_single_token_has_no_gap():
    one = record(0.0, [1.0])
    assert one.gaps_s == []
    assert one.tpot_s == 0.0


def test_summary_counts_whole_requests_only():
    records = [record(0.0, [1.0, 2.0]), record(0.0, [4.0], error="SHORT"), record(1.0, [], error="RESOURCE_EXHAUSTED")]
    summary = summarise(records, {})
    assert (summary["num_requests"], summary["num_whole"]) == (3, 1)
    assert summary["errors"] == {"SHORT": 1, "RESOURCE_EXHAUSTED": 1}
    assert summary["duration_s"] == 4.0
    assert summary["requests_per_s"] == 0.25
    assert summary["output_tokens_per_s"] == 0.75
    assert summary["ttft_ms"]["p50"] == 1000.0
    assert "goodput_per_s" not in summary


def test_goodput_counts_refusals_as_misses():
    slo = parse_slo("ttft:1000 itl:500")
    records = [
        record(0.0, [1.0, 1.5]),  # exactly at both limits
        record(0.0, [1.001, 1.4]),
        record(0.0, [1.0, 1.501]),
        record(0.0, [], error="RESOURCE_EXHAUSTED"),
    ]
    assert [meets(one, slo) for one in records] == [True, False, False, False]
    summary = summarise(records, slo)
    assert summary["slo_met"] == 0.25
    assert summary["goodput_per_s"] == pytest.approx(1 / 1.501)


def test_what_was_offered_is_counted_over_the_time_in_which_it_came():
    """Three in two seconds, whatever rate was asked for; the tail of four seconds more counts for what was served."""
    records = [record(due, [due + 1.0, 6.0]) for due in (0.0, 0.5, 2.0)]
    summary = summarise(records, {}, is_open=True)
    assert (summary["offered_per_s"], summary["arrivals_s"]) == (1.5, 2.0)
    assert summary["requests_per_s"] == 3 / summary["duration_s"]
    assert "offered: 1.50 requests/s, for 2.0 s" in headline(summary | {"client_cpu_share": 0.1})
    assert "offered_per_s" not in summarise(records, {})
    assert "offered_per_s" not in summarise(records[:1], {}, is_open=True), "one request is no rate"


def test_the_report_says_how_a_request_meets_itl():
    whole = [record(0.0, [1.0, 1.1])]
    for slo, is_said in (({"itl": 200.0}, True), ({"ttft": 200.0}, False)):
        text = headline(summarise(whole, slo) | {"client_cpu_share": 0.1})
        assert ("99th percentile of its own gaps" in text) == is_said


def test_quantiles():
    points = quantiles([i / 1000 for i in range(101)])
    assert points == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert quantiles([]) is None


def test_slo():
    assert parse_slo("") == {}
    assert parse_slo("ttft:500, e2e:2e3") == {"ttft": 500.0, "e2e": 2000.0}
    assert parse_slo("ttft:200ms itl:0.05s e2e:2s") == pytest.approx({"ttft": 200, "itl": 50, "e2e": 2000})
    for bad in (
        "ttft:ms",
        "ttft:s",
        "ttft:5m",
        "ttft",
        "ttft:",
        "ttft:x",
        "ttft:-1",
        "ttft:0",
        "ttft:inf",
        "ttft:nan",
        "speed:1",
    ):
        with pytest.raises(StartupError, match="--slo"):
            parse_slo(bad)


def test_nothing_at_all_is_still_a_summary():
    summary = summarise([record(0.5, [], error="UNAVAILABLE")], {"ttft": 1.0})
    assert summary["ttft_ms"] is None
    assert summary["output_tokens"] == 0
    assert summary["slo_met"] == 0.0

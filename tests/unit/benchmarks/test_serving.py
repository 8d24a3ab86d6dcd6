"""What the service benchmark computes from arrival times, and the workloads it sends."""

import itertools
import random

import pytest

from benchmarks import peers, serving
from benchmarks.workload import mixed

ANSWERS = [
    {"due_s": 0.0, "stamps": [[0.5, 1], [0.6, 2], [0.75, 1]]},
    {"due_s": 1.0, "stamps": [[3.0, 1], [4.0, 1]]},
]


def test_summary_of_two_streams():
    found = serving.summary(ANSWERS)
    assert found["seconds"] == 4.0
    assert found["tok_s"] == pytest.approx(6 / 4)
    assert found["req_s"] == pytest.approx(2 / 4)
    assert found["ttft_p50_s"] == found["ttft_p99_s"] == pytest.approx(2.0)
    # Gaps, a message of two tokens counting as two halves: 0.05, 0.05, 0.15, 1.0.
    assert found["itl_p50_s"] == pytest.approx(0.15)
    assert found["itl_p99_s"] == pytest.approx(1.0)
    # The second stream waited two seconds for its first token.
    assert found["goodput_req_s"] == pytest.approx(1 / 4)


def test_a_stream_of_one_token_has_no_gaps():
    found = serving.summary([{"due_s": 0.0, "stamps": [[0.25, 1]]}])
    assert (found["itl_p50_s"], found["tok_s"]) == (0.0, 4.0)


def test_arrivals_realise_the_rate():
    requests = serving.poisson(mixed(20, 1), rate=4.0, seed=9)
    due = [request.due_s for request in requests]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(20 / 4.0)
    assert len({round(b - a, 9) for a, b in itertools.pairwise(due)}) == 19


def test_fresh_prompts_keep_their_lengths():
    items = mixed(8, 1)
    fresh = serving.freshen(items, random.Random(5))
    assert [(len(i.prompt), i.num_output) for i in fresh] == [(len(i.prompt), i.num_output) for i in items]
    assert all(a.prompt[:8] != b.prompt[:8] and a.prompt[8:] == b.prompt[8:] for a, b in zip(items, fresh, strict=True))


def test_the_table_names_the_ratio_to_the_best_peer():
    rows = [
        {"peer": "stepwire-bf16", "wl": "W1", "tok_s": 300.0},
        {"peer": "ov-bf16", "wl": "W1", "tok_s": 200.0},
        {"peer": "vllm-bf16", "wl": "W1", "tok_s": 150.0},
        {"peer": "vllm-bf16", "wl": "W2", "itl50": 0.0125},
    ]
    lines = peers.table(rows).splitlines()
    assert lines[2].startswith("| stepwire-bf16 | 300 |")
    assert "12.5" in lines[4]
    assert lines[-1] == "stepwire-bf16: W1 1.50x the best peer"

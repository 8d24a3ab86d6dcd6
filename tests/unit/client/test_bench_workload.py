"""Which requests a benchmark sends: reproducible, within the model's room, with the statistics that were asked for."""

import json
import statistics
from itertools import pairwise

import pytest

from scheduler_svc.client.workload import Job, Room, Shape, as_text, make_jobs, read_trace
from scheduler_svc.errors import StartupError

ROOM = Room(vocab_size=1000, max_model_len=4096)


def test_the_same_seed_makes_the_same_jobs():
    shape = Shape(num_requests=20, rate=3.0)
    assert make_jobs(shape, ROOM) == make_jobs(shape, ROOM)
    assert make_jobs(shape, ROOM) != make_jobs(Shape(num_requests=20, rate=3.0, seed=1), ROOM)


@pytest.mark.parametrize("spread", ["lognormal", "uniform", "fixed"])
def test_lengths_have_the_mean_that_was_asked_for(spread):
    jobs = make_jobs(Shape(num_requests=3000, prompt_tokens=100, output_tokens=50, spread=spread), ROOM)
    # Standard error of the mean is about 1.2 for the widest spread.
    assert abs(statistics.mean(len(job.prompt) for job in jobs) - 100) < 6
    assert abs(statistics.mean(job.num_output for job in jobs) - 50) < 3
    assert all(job.at_s is None and job.num_output >= 1 and job.prompt for job in jobs)
    assert all(256 <= token < 1000 for job in jobs for token in job.prompt)


def test_lengths_and_arrivals_are_the_same_for_every_vocabulary():
    shape = Shape(
        num_requests=50, prompt_tokens=30, output_tokens=20, rate=5.0, turns=2, shared_prefix=8, prefix_groups=3
    )
    small, large = (make_jobs(shape, Room(vocab_size, 4096)) for vocab_size in (600, 200_000))
    assert [sizes(job) for job in small] == [sizes(job) for job in large]
    assert max(max(job.prompt) for job in small) < 600 < max(max(job.prompt) for job in large) < 200_000


def sizes(job):
    return job.at_s, len(job.prompt), job.num_output, [(len(turn.said), turn.num_output) for turn in job.later]


def test_nothing_exceeds_the_context():
    room = Room(vocab_size=100, max_model_len=64)
    jobs = make_jobs(Shape(num_requests=200, prompt_tokens=80, output_tokens=80), room)
    assert all(len(job.prompt) + job.num_output <= 64 and job.num_output >= 1 for job in jobs)
    assert any(len(job.prompt) == 63 for job in jobs)


def test_a_shared_prefix_is_shared_and_nothing_else():
    jobs = make_jobs(Shape(num_requests=10, shared_prefix=32, prompt_tokens=40, spread="fixed"), ROOM)
    assert len({tuple(job.prompt[:32]) for job in jobs}) == 1
    assert len({tuple(job.prompt[32:]) for job in jobs}) == 10
    assert {len(job.prompt) for job in jobs} == {72}


def test_a_mix_of_prefixes():
    shape = Shape(
        num_requests=2000, shared_prefix=8, prefix_groups=4, prefix_share=0.5, prompt_tokens=10, spread="fixed"
    )
    jobs = make_jobs(shape, ROOM)
    heads = [tuple(job.prompt[:8]) for job in jobs if len(job.prompt) == 18]
    assert len(set(heads)) == 4
    # Half of them, give or take five standard errors of 0.011; each group a quarter of those.
    assert abs(len(heads) / len(jobs) - 0.5) < 0.056
    assert all(abs(heads.count(head) / len(heads) - 0.25) < 0.07 for head in set(heads))
    assert sum(len(job.prompt) == 10 for job in jobs) == len(jobs) - len(heads)


def test_conversations_have_turns_and_room():
    shape = Shape(num_requests=30, turns=4, prompt_tokens=10, output_tokens=5, spread="fixed", rate=8.0)
    jobs = make_jobs(shape, ROOM)
    assert [job.num_requests for job in jobs] == [4] * 7 + [2]
    assert all(len(turn.said) == 10 and turn.num_output == 5 for job in jobs for turn in job.later)
    short = make_jobs(shape, Room(1000, 40))
    assert sum(job.num_requests for job in short) == 30
    assert {job.num_requests for job in short} == {2}
    # The rate is of requests: conversations of four come a quarter as often.
    many = make_jobs(Shape(num_requests=8000, turns=4, prompt_tokens=1, output_tokens=1, rate=8.0), ROOM)
    assert many[-1].at_s == pytest.approx(8000 / 8, rel=0.12)


def test_equal_ids_are_equal_words():
    assert as_text([300, 301, 300]).split()[0] == as_text([300])
    assert len(as_text(list(range(256, 900))).split()) == 644


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    shape = Shape(num_requests=8001, prompt_tokens=1, spread="fixed", rate=20.0, burstiness=burstiness)
    times = [job.at_s for job in make_jobs(shape, ROOM)]
    assert times[0] == 0.0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    # A gamma distribution of shape k has a squared coefficient of variation of 1 / k.
    assert statistics.variance(gaps) / statistics.mean(gaps) ** 2 == pytest.approx(1 / burstiness, rel=0.2)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"num_requests": 0}, "--requests 0"),
        ({"prompt_tokens": 0}, "--prompt-tokens 0"),
        ({"output_tokens": 0}, "--output-tokens 0"),
        ({"shared_prefix": -1}, "--shared-prefix -1"),
        ({"rate": 0.0}, "--rate 0"),
        ({"burstiness": 0.0}, "--burstiness 0"),
        ({"spread": "normal"}, "--spread normal"),
        ({"turns": 0}, "--turns 0"),
        ({"prefix_groups": 0}, "--prefix-groups 0"),
        ({"prefix_share": 1.5}, "--prefix-share 1.5"),
    ],
)
def test_shapes_out_of_range_are_refused(change, option):
    with pytest.raises(StartupError, match=option):
        Shape(**change)


def test_traces_as_csv_and_as_json_lines(tmp_path):
    rows = [
        {"arrival": 1.5, "prompt_tokens": 10, "output_tokens": 3, "prefix_group": "a", "prefix_tokens": 8},
        {"arrival": 0, "prompt_tokens": 20, "output_tokens": 4, "prefix_group": "a", "prefix_tokens": 8},
        {"arrival": 2, "prompt_tokens": 9, "output_tokens": 5, "prefix_group": "b", "prefix_tokens": 8},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    lines = [",".join(rows[0])] + [",".join(str(value) for value in row.values()) for row in rows]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    jobs = read_trace(tmp_path / "t.jsonl", ROOM)
    assert jobs == read_trace(tmp_path / "t.csv", ROOM)
    assert [(job.at_s, len(job.prompt), job.num_output) for job in jobs] == [(0, 20, 4), (1.5, 10, 3), (2, 9, 5)]
    first, second, third = (job.prompt[:8] for job in jobs)
    assert first == second != third
    assert isinstance(jobs[0], Job)


@pytest.mark.parametrize(
    "text", ["{", '{"arrival": 1}', '{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}', "[1]", "", '"x"',
             '{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}'],
)  # fmt: skip
def test_damaged_traces_are_one_line(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"the trace .* is (damaged|empty)") as caught:
        read_trace(path, ROOM)
    assert "\n" not in str(caught.value)


def test_a_missing_trace(tmp_path):
    with pytest.raises(StartupError, match="No such file"):
        read_trace(tmp_path / "none.csv", ROOM)

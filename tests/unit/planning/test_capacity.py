"""The planner's arithmetic: sizes against counted ones, fits against what made the samples, virtual time against sums
done by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from scheduler_svc.cli import app
from scheduler_svc.client.calibrate import CROWDS, NUM_NEEDED, PROMPT_LENGTHS, _pieces
from scheduler_svc.core.contract import Geometry
from scheduler_svc.errors import StartupError
from scheduler_svc.plan_command import parse_size
from scheduler_svc.planning import capacity
from scheduler_svc.planning.capacity import Demand, _even, at_rate, geometry_for, make_plan, requests, users_that_fit
from scheduler_svc.planning.sizes import read_size, size_of
from scheduler_svc.planning.step_model import (
    DEVICES,
    DecodeSample,
    PrefillSample,
    StepModel,
    estimate,
    fit,
    parse_step_us,
)
from scheduler_svc.planning.virtual import Load, percentile_by, simulate

GEOMETRY = Geometry(1000, 16, 16, 4096, 512, 1000)
MODEL = StepModel(base_us=1000, row_us=100, token_us=50, stored_us=0.5)

SMOLLM2 = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


# ---- sizes -----------------------------------------------------------------------------------------------------


def test_sizes_are_those_the_makers_tell():
    # The numbers of parameters that the model cards tell.
    assert size_of("a", SMOLLM2).num_params == 134_515_008
    assert size_of("b", LLAMA3_8B).num_params == 8_030_261_248
    # 128 KiB in 16 bits.
    assert size_of("b", LLAMA3_8B).kv_bytes_per_token("bfloat16") == 131_072
    assert size_of("b", LLAMA3_8B).kv_bytes_per_token("fp8") == 65_536


def test_quantised_checkpoints_count_as_what_they_become():
    quantised = {**LLAMA3_8B, "quantization_config": {"quant_method": "awq", "bits": 4}}
    assert size_of("b", quantised) == size_of("b", LLAMA3_8B)
    assert size_of("b", quantised).weight_bytes("bfloat16") == 2 * 8_030_261_248


def test_experts_weigh_all_and_compute_few():
    mixture = {**LLAMA3_8B, "num_local_experts": 8, "num_experts_per_tok": 2}
    expert = 3 * 4096 * 14336 * 32
    dense, sparse = size_of("b", LLAMA3_8B), size_of("m", mixture)
    assert sparse.num_params - dense.num_params == 7 * expert
    assert sparse.num_active - dense.num_active == expert


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"hidden_size": "x"}'])
def test_a_configuration_that_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match="does not describe a decoder"):
        read_size(tmp_path)


def test_no_configuration(tmp_path):
    with pytest.raises(StartupError, match="cannot read"):
        read_size(tmp_path)


# ---- step time -------------------------------------------------------------------------------------------------


def test_a_fit_finds_what_made_the_samples():
    true = StepModel(6000, 400, 250, 0.7, request_us=2000)
    decodes = [
        DecodeSample(n, n * s, true.us(n, 0, n * s)) for n, s in ((1, 20), (4, 20), (32, 20), (8, 400), (16, 300))
    ]
    prefills = [PrefillSample(n, true.request_us + true.us(0, n, 0)) for n in (32, 256, 512)]
    found = fit(decodes, prefills)
    for name in ("base_us", "row_us", "token_us", "stored_us", "request_us"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6), name


def test_no_coefficient_is_negative_however_noisy_the_samples():
    print("seed 5")
    noise = np.random.default_rng(5)
    for _ in range(50):
        decodes = [
            DecodeSample(n, n * s, float(noise.uniform(5000, 6000))) for n, s in ((1, 9), (4, 9), (16, 9), (8, 400))
        ]
        prefills = [PrefillSample(n, float(noise.uniform(1000, 2000))) for n in (32, 64, 512)]
        found = fit(decodes, prefills)
        assert min(found.base_us, found.row_us, found.token_us, found.stored_us, found.request_us) >= 0


def test_an_estimate_is_bandwidth_and_arithmetic():
    size, device = size_of("b", LLAMA3_8B), DEVICES["h200"]
    step = estimate(device, size, "bfloat16", "bfloat16")
    # 16 GB at 60 % of 4.8 TB/s, and 16 GFLOP at 60 % of 989 TFLOP/s.
    assert step.base_us == pytest.approx(1500 + 16.06e9 / 2.88e12 * 1e6, rel=0.001)
    assert step.token_us == pytest.approx(2 * size.num_active / 593.4e12 * 1e6, rel=0.001)


def test_a_step_time_that_is_given():
    assert parse_step_us("1,2,3,4") == StepModel(1, 2, 3, 4)
    assert parse_step_us("1,0,0,0,9") == StepModel(1, 0, 0, 0, 9)
    for bad in ("", "1", "0,1,1,1", "1,-2,3,4", "1,2,3,nan", "1,2,3,4,5,6"):
        with pytest.raises(StartupError, match="--step-us"):
            parse_step_us(bad)


# ---- virtual time ----------------------------------------------------------------------------------------------


def one(num_prompt: int, num_output: int) -> Load:
    return Load(np.array([num_prompt]), np.array([num_output]), np.array([0.0]))


def test_one_stream_takes_what_its_steps_take():
    out = simulate(one(100, 5), GEOMETRY, MODEL)
    first = MODEL.us(0, 100, 100)
    rest = [MODEL.us(1, 0, 100 + i) for i in range(1, 5)]
    assert out.first_s[0] == pytest.approx(first / 1e6, abs=1e-5)
    assert out.last_s[0] == pytest.approx((first + sum(rest)) / 1e6, abs=1e-5)
    assert out.num_tokens[0] == 5
    assert out.num_preemptions == 0


def test_a_prompt_beyond_the_budget_is_computed_in_chunks():
    out = simulate(one(1300, 1), GEOMETRY, MODEL)
    steps = [MODEL.us(0, chunk, stored) for chunk, stored in ((512, 512), (512, 1024), (276, 1300))]
    assert out.first_s[0] == pytest.approx(sum(steps) / 1e6, abs=1e-5)


def test_a_request_takes_its_way_first():
    late = simulate(one(100, 2), GEOMETRY, StepModel(1000, 100, 50, 0.5, request_us=7000))
    soon = simulate(one(100, 2), GEOMETRY, MODEL)
    assert late.first_s[0] - soon.first_s[0] == pytest.approx(0.007)


def test_streams_of_a_closed_loop_follow_one_another():
    count = np.full(6, 8)
    out = simulate(Load(np.full(6, 10), count, num_streams=2), GEOMETRY, MODEL)
    assert out.due_s[:2].tolist() == [0.0, 0.0]
    # Whoever comes next is due when somebody ended.
    assert all(any(due == pytest.approx(end) for end in out.last_s) for due in out.due_s[2:])
    assert out.num_tokens.tolist() == count.tolist()
    assert 1 < out.num_running <= 2


def test_a_full_batch_of_equal_streams_goes_at_the_models_pace():
    """Sixteen rows in step: their gap is the step time of sixteen rows."""
    out = simulate(Load(np.full(16, 16), np.full(16, 100), num_streams=16), GEOMETRY, MODEL)
    stored = 16 * (16 + 50)
    assert np.median(out.gaps_s) * 1e6 == pytest.approx(MODEL.us(16, 0, stored), rel=0.02)


def test_refusals_are_told_and_end_nothing():
    out = simulate(Load(np.array([5000, 10]), np.array([5, 5]), num_streams=1), GEOMETRY, MODEL)
    assert out.refused.tolist() == [True, False]
    assert out.num_tokens.tolist() == [0, 5]


def test_percentiles_by_owner_are_numpys():
    print("seed 2")
    draw = np.random.default_rng(2)
    whose, values = draw.integers(0, 7, 300), draw.random(300)
    found = percentile_by(whose, values, 9, 0.99)
    for owner in range(7):
        assert found[owner] == pytest.approx(np.percentile(values[whose == owner], 99))
    assert found[7:].tolist() == [0, 0]


# ---- the plan --------------------------------------------------------------------------------------------------

DEMAND = Demand(60, 12, {"ttft": 200.0, "itl": 20.0}, num_requests=30)


def test_users_in_memory_are_whole_blocks():
    geometry = Geometry(10, 16, 16, 4096, 512, 1000)
    assert [users_that_fit(geometry, n) for n in (16, 17, 160, 161)] == [10, 5, 1, 0]


def test_memory_becomes_blocks():
    made = geometry_for(1000 * 16 * 100, 100, 16, 9, max_num_seqs=4, budget=64, max_model_len=99)
    assert made == Geometry(1000, 16, 4, 99, 64, 9)
    with pytest.raises(StartupError, match="not one block"):
        geometry_for(10, 100, 16, 9, max_num_seqs=4, budget=64, max_model_len=99)


def test_lengths_have_the_means_and_fit():
    demand = Demand(100, 50, {})
    num_prompt, num_output = requests(demand, GEOMETRY, 4000)
    assert num_prompt.mean() == pytest.approx(100, rel=0.05)
    assert num_output.mean() == pytest.approx(50, rel=0.05)
    num_prompt, num_output = requests(Demand(100, 90, {}), Geometry(10, 16, 4, 200, 64, 1000), 100)
    assert (num_prompt + num_output).max() <= 160


def test_what_holds_is_in_time_and_more_is_not():
    plan = make_plan(DEMAND, GEOMETRY, MODEL, choose_budget=False, choose_block_size=False)
    assert plan.geometry == GEOMETRY
    assert plan.holds is not None
    assert plan.holds.in_time >= 0.9
    assert plan.holds.rate < plan.saturated.served_per_s
    assert plan.num_clients == 32
    # Little's law: in a steady state there are rate x time of a request at once.
    point = at_rate(DEMAND, GEOMETRY, MODEL, plan.holds.rate)
    e2e_s = 1e-3 * point.ttft_p50 + 11e-3 * point.itl_p50
    assert point.num_running == pytest.approx(point.served_per_s * e2e_s, rel=0.5)


def closed_form(rows: int, demand: Demand) -> float:
    """Requests a second with `rows` always full: one costs its prompt and its share of the steps it decodes in."""
    num_prompt, num_output = demand.prompt_tokens, demand.output_tokens
    us = MODEL.token_us * num_prompt + (num_output - 1) * (
        MODEL.row_us + MODEL.base_us / rows + MODEL.stored_us * (num_prompt + num_output / 2)
    )
    return 1e6 / us


@pytest.mark.parametrize("rows", [8, 32])
def test_the_saturated_rate_is_what_the_steps_allow(rows):
    """Below it what is sent is served, beyond it a queue grows; what is said to hold is served."""
    demand, geometry = Demand(60, 40, {"ttft": 2000.0}), replace(GEOMETRY, max_num_seqs=rows)
    plan = make_plan(demand, geometry, MODEL, choose_budget=False, choose_block_size=False)
    assert plan.saturated.served_per_s == pytest.approx(closed_form(rows, demand), rel=0.1)
    assert plan.saturated.num_running == pytest.approx(rows, rel=0.02)
    assert plan.holds is not None
    # Long waits are allowed: nearly everything that can be served holds.
    assert 0.85 * plan.saturated.served_per_s < plan.holds.rate <= plan.saturated.served_per_s
    assert plan.holds.served_per_s == pytest.approx(plan.holds.rate, rel=0.05)
    half, more = plan.around
    assert half.is_served
    assert not more.is_served
    assert half.served_per_s < plan.holds.served_per_s < 1.05 * more.served_per_s
    assert half.num_running < plan.holds.num_running < more.num_running
    assert half.ttft_p99 < plan.holds.ttft_p99 < more.ttft_p99


def test_stretches_have_the_mean_and_keep_their_order():
    made = _even(np.array([1.0, 3.0, 2.0, 6.0, 8.0]), 10.0, 2)
    assert made.tolist() == pytest.approx([5.0, 15.0, 3.75, 11.25, 15.0])


def test_means_are_of_the_stretch_alone():
    out = simulate(one(100, 5), GEOMETRY, MODEL)
    whole, none = out.during(0.0, out.end_s), out.during(out.end_s, out.end_s)
    assert whole.tokens_per_s == pytest.approx(5 / out.end_s)
    assert none.tokens_per_s == 0
    # From the first token to the last: four more.
    rest = out.during(out.first_s[0], out.end_s)
    assert rest.tokens_per_s == pytest.approx(4 / (out.end_s - out.first_s[0]))


def test_no_rate_holds_what_cannot_be():
    plan = make_plan(Demand(60, 12, {"ttft": 0.1}, num_requests=20), GEOMETRY, MODEL)
    assert plan.holds is None
    assert plan.around == []


def test_a_smaller_budget_is_advised_for_short_gaps(monkeypatch):
    """Prompts of 500 tokens in one step hold everybody up for 26 ms; in chunks of 128 for 8."""
    monkeypatch.setattr(capacity, "BUDGETS", (128, 512))
    demand = Demand(500, 10, {"itl": 12.0}, num_requests=20)
    plan = make_plan(demand, GEOMETRY, MODEL, choose_block_size=False)
    assert plan.geometry.max_num_batched_tokens == 128


@pytest.mark.parametrize(("prompt", "says"), [(5000, "exceed the context"), (4000, "not one request")])
def test_what_can_never_fit_is_said(prompt, says):
    with pytest.raises(StartupError, match=says):
        make_plan(Demand(prompt, 10, {}), Geometry(100, 16, 4, 4096, 512, 1000), MODEL)


# ---- the command -----------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output if result.exception is None else str(result.exception)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMOLLM2, "model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


def test_it_prints_a_plan(model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(capacity, "HALVINGS", 2)
    lengths = ("--prompt-tokens", "40", "--output-tokens", "3", "--block-size", "16", "--max-num-batched-tokens", "256")
    given = ("--model", model, "--step-us", "1000,50,20,0.1", "--kv-memory", "64MiB", *lengths)
    status, text = run(*given)
    assert status == 0, text
    assert "135 M parameters" in text
    assert "It holds" in text
    assert "Choose --max-num-batched-tokens 256 --block-size 16 --num-blocks 182" in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 100
    plan = json.loads(run(*given, "--json")[1])
    assert plan["plan"]["geometry"]["num_blocks"] == 64 * 2**20 // (23_040 * 16)
    assert plan["plan"]["holds"]["in_time"] >= 0.9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--calibrate, --device, --step-us"),
        (("--device", "h200", "--step-us", "1,1,1,1"), "--calibrate, --device, --step-us"),
        (("--device", "abacus"), "abacus"),
        (("--step-us", "1,1,1,1"), "--kv-memory"),
        (("--device", "h200", "--dtype", "int3"), "int3"),
        (("--step-us", "1,1,1,1", "--kv-memory", "much"), "--kv-memory"),
        (("--calibrate", "127.0.0.1:1"), "nothing answers"),
    ],
)
def test_what_is_missing_is_named(model, arguments, says):
    status, text = run("--model", model, *arguments)
    assert status == 1
    assert says in text


def test_sizes_of_memory():
    assert parse_size("") is None
    assert [parse_size(text) for text in ("10", "2KiB", "1.5 MB", "4GiB")] == [10, 2048, 1.5 * 2**20, 4 * 2**30]
    assert math.isclose(parse_size("1t") or 0, 2**40)


def test_a_calibration_is_what_it_needs_and_as_much_more_as_time_allows():
    crowds, num_asked = [(1, 16), (16, 16), (4, 384), (32, 16)], 0

    def is_over() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked == 3

    needed = [(1, length, 0) for length in PROMPT_LENGTHS] + [(1, 16, 1), (1, 16, 16), (1, 384, 4)]
    assert list(_pieces(crowds, lambda: True)) == needed
    made = list(_pieces(crowds, is_over))
    assert made == [*needed, (1, 16, 32), (2, PROMPT_LENGTHS[0], 0)]


def test_what_a_calibration_needs_tells_all_coefficients():
    true = StepModel(6000, 400, 250, 0.7, request_us=2000)
    crowds = [(streams, streams * (length + 12)) for streams, length in CROWDS[:NUM_NEEDED]]
    prefills = [PrefillSample(n, true.request_us + true.us(0, n, 0)) for n in PROMPT_LENGTHS]
    found = fit([DecodeSample(n, stored, true.us(n, 0, stored)) for n, stored in crowds], prefills)
    assert found.row_us == pytest.approx(true.row_us, rel=1e-6)
    assert found.stored_us == pytest.approx(true.stored_us, rel=1e-6)

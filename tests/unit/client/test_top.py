"""The live view: figures from snapshots, and frames that fit any terminal whatever is in them."""

import re

import grpc
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from protos.stepwire.admin.v1 import admin_pb2 as pb
from protos.stepwire.admin.v1 import admin_pb2_grpc
from scheduler_svc.cli import app
from scheduler_svc.client import top_view
from scheduler_svc.client.top import Top, matching
from scheduler_svc.client.top_rates import History, Rates, between, quantile
from scheduler_svc.client.top_view import State, draw, sparkline
from tests.unit.client.served import served

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def snapshot(uptime_ms: int = 1000, **changes) -> pb.Snapshot:
    values = {
        "boot_id": 7,
        "epoch": 1,
        "executor_ready": True,
        "device": "cpu",
        "dtype": "bfloat16",
        "max_num_seqs": 64,
    }
    made = pb.Snapshot(uptime_ms=uptime_ms, **{**values, **changes})
    for histogram in (made.time_to_first_token, made.inter_token):
        if not histogram.counts:
            histogram.bounds_s.extend(BOUNDS)
            histogram.counts.extend([0] * 5)
    return made


def busy(num_blocks: int = 3000, num_running: int = 64, num_waiting: int = 30, name: str = "request-{}") -> pb.Snapshot:
    """Everything at once, and long names."""
    rng = np.random.default_rng(1)

    def sequences(count: int, first: int) -> pb.Sequences:
        return pb.Sequences(
            request_ids=[name.format(first + i) for i in range(count)],
            tenants=["a tenant with quite a long name"] * count,
            rows=range(count),
            num_prompt_tokens=[123_456] * count,
            num_computed_tokens=[100 * i for i in range(count)],
            num_output_tokens=[i % 3 * 40_000 for i in range(count)],
            max_tokens=[123_456] * count,
            num_shared_tokens=[99_999] * count,
            num_preemptions=[i % 2 for i in range(count)],
            age_ms=[10**i for i in range(8)][:count] + [500_000] * max(0, count - 8),
        )

    return snapshot(
        3_600_000 * 30,
        num_running=num_running,
        num_waiting=num_waiting,
        totals=pb.Totals(preemptions=123_456_789, recomputed_tokens=123_456_789),
        blocks=pb.Blocks(
            total=num_blocks,
            owned=num_blocks // 2,
            cached=num_blocks // 4,
            free=num_blocks // 4,
            shared=num_blocks // 8,
            block_size=16,
            cells=rng.integers(0, 6, min(num_blocks, 16_384)).astype(np.uint8).tobytes(),
        ),
        running=sequences(num_running, 0),
        waiting=sequences(num_waiting, 1000),
        shared=[pb.SharedPrefix(num_sequences=60, num_blocks=1000, request_id="x" * 32)] * 8,
        tenants=[pb.Tenant(name="t" * 40, num_running=64, num_waiting=1000, num_blocks=10)] * 16,
        frontends=[pb.Frontend(session=i) for i in range(64)],
        executors=[pb.Executor(serving=i == 0) for i in range(9)],
    )


RATES = Rates(123_456, 123_456, 123_456, 9, 12_345, 1234.5, 12.3, 9.99, 999.9, 123.4, (60_000, 60_000), (999.9, 5000))


# ---- figures ---------------------------------------------------------------------------------------------------


def test_rates_are_differences_over_time():
    before = snapshot(1000, totals=pb.Totals(generation_tokens=100, steps=10, plan_s=0.1, device_s=1.0, step_s=1.5))
    after = snapshot(3000, totals=pb.Totals(generation_tokens=500, steps=30, plan_s=0.3, device_s=2.0, step_s=3.5))
    rates = between(before, after, before)
    assert (rates.generated, rates.steps) == (200.0, 10.0)
    assert rates.plan_ms == pytest.approx(10)
    assert rates.device_ms == pytest.approx(50)
    assert rates.step_ms == pytest.approx(100)
    assert rates.wire_ms == pytest.approx(50)
    assert rates.ttft_ms is rates.itl_ms is None


def test_latencies_are_those_of_the_window():
    before, after = snapshot(1000), snapshot(2000)
    before.inter_token.counts[0] = 1000  # all of them before the window
    after.inter_token.counts[:] = [1000, 0, 100, 0, 0]
    assert between(before, after, before).itl_ms == pytest.approx((55.0, 99.1))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_quantile_of_buckets_is_within_its_bucket(share):
    print("seed 3")
    values = np.random.default_rng(3).lognormal(-3, 1, 5000)
    bounds = np.geomspace(0.001, 10, 40)
    counts = np.histogram(values, [0, *bounds, np.inf])[0].tolist()
    exact = float(np.quantile(values, share))
    place = int(np.searchsorted(bounds, exact))
    assert bounds[place - 1] <= quantile(bounds.tolist(), counts, share) <= bounds[place]


def test_beyond_the_last_bound_the_bound_is_told():
    assert quantile([1.0, 2.0], [0, 0, 5], 0.5) == 2.0


def test_a_new_scheduler_begins_a_new_history():
    history = History()
    assert history.rates() == Rates()
    for uptime in (1000, 2000, 2000):
        history.add(snapshot(uptime, totals=pb.Totals(generation_tokens=uptime)))
    assert history.rates().generated == pytest.approx(1000)
    history.add(snapshot(500, boot_id=8))
    assert history.rates() == Rates()
    assert history.latest.boot_id == 8


# ---- frames ----------------------------------------------------------------------------------------------------

SIZES = [(72, 20), (80, 24), (100, 30), (119, 41), (160, 48), (250, 80)]
STATES = {
    "busy": lambda: State(
        "127.0.0.1:50051", busy(), RATES, [float(i) for i in range(240)], "a-model-of-a-long-name" * 3
    ),
    "idle": lambda: State("127.0.0.1:50051", snapshot(), Rates(), [], "m"),
    "small": lambda: State("h:1", busy(100, 2, 0), RATES, [0.0, 5.0], "m", chosen=1),
    "large pool": lambda: State("h:1", busy(60_000), RATES, [1.0], "m"),
    "story": lambda: State("h:1", busy(), RATES, [1.0], "m", story_of="r" * 90, story=["step 1: " + "x" * 300] * 50),
    "nobody": lambda: State("h:1"),
    "away": lambda: State("h:1", None, problem="nothing answers " * 30),
    "picture": lambda: State("h:1", busy(), RATES, [1.0], "m", interactive=False, chosen=70),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", STATES)
def test_a_frame_has_the_size_of_the_terminal(name, size):
    width, height = size
    lines = draw(STATES[name](), width, height)
    assert len(lines) == height
    assert [line.plain for line in lines if line.cell_len > width] == []


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_figures_of_usual_size_are_all_there(size):
    seen = busy(1500, 12, 3)
    seen.totals.preemptions, seen.totals.recomputed_tokens = 3, 450
    del seen.frontends[1:], seen.executors[2:]
    rates = Rates(479, 1204, 310, 0.1, 29, 34.2, 0.14, 0.21, 33.3, 0.9, (120, 850), (34.1, 80.4))
    text = "\n".join(line.plain for line in draw(State("127.0.0.1:50051", seen, rates, [1.0] * 9, "SmolLM2"), *size))
    for words in (
        *("SERVING", "SmolLM2", "bfloat16 on cpu", "epoch 1", "479 drawn", "1,204 computed, 310 from cache"),
        *("34.2 ms", "plan 0.14", "commit 0.21", "wire 0.90", "device 33.3", "TTFT p50 120  p99 850 ms"),
        *("ITL p50 34.1  p99 80.4 ms", "3 preempted, 450 tokens recomputed", "frontends 1  executors 1 of 2"),
        *("1,500 x 16", "shared 187", "owned 563", "cached 375", "free 375", "1000 blocks by 60"),
        *("running 12 of 64  waiting 3", "prefill", "decode", "tenants", "q ", "quit", "story", "127.0.0.1:50051"),
    ):
        assert words in text, words


def test_the_map_says_in_characters_what_it_says_in_colours():
    seen = snapshot(
        blocks=pb.Blocks(total=6, owned=3, shared=1, cached=1, free=2, block_size=16, cells=bytes([0, 1, 2, 3, 9, 0]))
    )
    lines = [line.plain for line in draw(State("h:1", seen), 80, 24)]
    assert " ·░▒██·" in lines
    assert len({glyph for glyph, _ in top_view.MAP.values()}) == 4


@pytest.mark.parametrize("size", SIZES)
def test_the_map_is_whole_and_no_longer_than_it_needs(size):
    """Where a character stands for several blocks, that is said."""
    width, height = size
    for total in (1, 70, 455, 5000):
        lines = [line.plain for line in draw(State("h:1", busy(total, 3, 0), RATES, [], "m"), width, height)]
        first = next(i for i, line in enumerate(lines) if line.startswith("KV blocks")) + 1
        last = next(i for i, line in enumerate(lines) if "most shared" in line)
        assert all(line.strip() for line in lines[first:last])
        per_cell = -(-total // sum(len(line) - 1 for line in lines[first:last]))
        assert (f"a character is {per_cell} blocks" in lines[last]) == (per_cell > 1)


def test_colours_are_of_the_sixteen():
    styles = {span.style for name in STATES for line in draw(STATES[name](), 160, 48) for span in line.spans}
    words = {word for style in styles for word in str(style).split()}
    assert words <= {"bold", "dim", "reverse", "red", "green", "bright_blue", "magenta", "cyan"}


def test_a_clients_names_are_not_trusted_with_the_terminal():
    seen = busy(100, 3, 0, name="\x1b[2J\nX{}")
    text = "\n".join(line.plain for line in draw(State("h:1", seen, RATES), 80, 24))
    assert "\x1b" not in text
    assert text.count("\n") == 23


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "SERVING"),
        ({"executor_ready": False}, "NO EXECUTOR"),
        ({"stalled": True}, "STALLED"),
        ({"draining": True}, "DRAINING"),
    ],
)
def test_the_condition_is_a_word(changes, word):
    assert word in draw(State("h:1", snapshot(**changes)), 80, 24)[0].plain


def test_a_small_terminal_is_told_so():
    assert draw(State("h:1"), 40, 10)[0].plain == "top needs 72x20, this is 40x10"


def test_sparks():
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 50, 100]) == "▁▅█"


# ---- keys ------------------------------------------------------------------------------------------------------


async def test_keys_choose_pause_and_end():
    top = Top("h:1", interactive=True)
    top.heard(pb.WatchResponse(model="m", snapshot=busy(100, 3, 1)))
    assert [top.pressed(key) for key in ("j", "\x1b[B", "j", "j", "j")] == [True] * 5
    assert top.state.chosen == 3
    top.pressed("\x1b[A")
    assert top.state.chosen == 2
    top.pressed("\r")
    assert top.state.story_of == "request-2"
    top.pressed("\x1b")
    assert top.state.story_of == ""
    top.pressed("p")
    top.heard(pb.WatchResponse(model="m", snapshot=snapshot(10**9)))
    assert len(top.state.row_ids) == 4, "a paused view stands still"
    top.pressed("p")
    top.heard(pb.WatchResponse(model="m", snapshot=snapshot(2 * 10**9)))
    assert top.state.chosen == 0
    assert top.pressed("q") is False


# ---- the command -----------------------------------------------------------------------------------------------


class Watched(admin_pb2_grpc.AdminServiceServicer):
    def Watch(self, request, context):
        for i in range(100):
            seen = busy()
            seen.uptime_ms += 500 * i
            seen.waiting.request_ids[0] = "slow-one"
            yield pb.WatchResponse(model="tiny", snapshot=seen)

    def GetStory(self, request, context):
        if request.request_id not in ("r1", "slow-one"):
            context.abort(grpc.StatusCode.NOT_FOUND, "nobody remembers a request of this id")
        return pb.GetStoryResponse(lines=["step 1: choice 0 submitted 3"])


@pytest.fixture
def address():
    with served(Watched(), admin_pb2_grpc.add_AdminServiceServicer_to_server) as running:
        yield running


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["top", *arguments])
    return result.exit_code, result.output if result.exception is None else str(result.exception)


def test_one_frame(address):
    status, text = run("--address", address, "--once", "--size", "100x30")
    assert status == 0
    assert len(text.splitlines()) == 30
    assert "SERVING" in text
    assert "request-0" in text


def test_a_picture_fetches_nothing(address, tmp_path):
    picture = tmp_path / "top.svg"
    assert run("--address", address, "--record", str(picture), "--size", "100x30")[0] == 0
    svg = picture.read_text()
    assert "SERVING" in svg
    assert re.findall(r"url\((?!#)", svg) == []
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]


def test_a_story(address):
    assert run("--address", address, "--story", "r1") == (0, "step 1: choice 0 submitted 3\n")
    assert "nobody remembers" in run("--address", address, "--story", "r2")[1]
    # An id that is asked for wins over those that begin so.
    assert run("--address", address, "--story", "slow") == (0, "request slow-one\nstep 1: choice 0 submitted 3\n")
    assert run("--address", address, "--story", "sl…ne")[0] == 0
    assert "5 requests begin so, as request-6" in run("--address", address, "--story", "request-6")[1]


def test_an_id_may_be_cut():
    ids = ["abc1", "abd2", "abc1", "a"]
    assert matching(ids, "abc") == ["abc1"]
    assert matching(ids, "ab") == ["abc1", "abd2"]
    assert matching(ids, "a…2") == ["abd2"]
    assert matching(ids, "x") == []


def test_rows_that_do_not_fit_are_counted():
    text = "\n".join(line.plain for line in draw(State("h:1", busy(3000, 64, 30), RATES, [], "m"), 80, 24))
    assert (running := re.search(r"not shown: (\d+) running and (\d+) waiting", text))
    rows = [line for line in text.splitlines() if re.match(r" (>| )? +req", line) and "tenant  " not in line]
    assert len(rows) == 94 - int(running[1]) - int(running[2])
    all_of_them = "\n".join(line.plain for line in draw(State("h:1", busy(100, 2, 1), RATES, [], "m"), 80, 24))
    assert "not shown" not in all_of_them
    assert re.search(r"^   request +tenant +tokens", all_of_them, re.MULTILINE)


def test_words_are_of_the_time_that_was_watched():
    seen = busy(100, 3, 0)
    text = "\n".join(line.plain for line in draw(State("h:1", seen, Rates(seconds=1.5, latency_seconds=1.5)), 100, 30))
    assert "no step ended in the last 1.5s" in text
    assert "TTFT none    ITL none    last 1.5s" in text
    assert "not seen yet" in "\n".join(line.plain for line in draw(State("h:1", seen), 100, 30))


def test_one_frame_waits_for_a_step_while_something_runs():
    top = Top("h:1", interactive=False)
    for number, (steps, has_seen) in enumerate(((0, False), (0, False), (1, True))):
        seen = busy(100, 3, 0)
        seen.uptime_ms += 500 * number
        seen.totals.steps = steps
        top.heard(pb.WatchResponse(model="m", snapshot=seen))
        assert top.has_seen_steps == has_seen
    idle = Top("h:1", interactive=False)
    idle.heard(pb.WatchResponse(model="m", snapshot=snapshot()))
    assert idle.has_seen_steps


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--once", "--size", "9"), "--size"),
        (("--record", "x.png"), "SVG"),
        (("--address", "127.0.0.1:1", "--once"), "nothing answers on 127.0.0.1:1: start"),
        ((), "--once"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, says):
    status, text = run(*arguments)
    assert status == 1
    assert says in text
    assert text.count("127.0.0.1:1") <= 1
    assert "\n" not in text.strip()


def test_the_frame_is_printed_as_it_was_drawn():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for line in draw(STATES["busy"](), 80, 24):
        console.print(line)
    console.file.close()
    assert max(len(line) for line in console.export_text().splitlines()) <= 80

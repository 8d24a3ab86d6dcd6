"""The load generator against a small server that counts what it is asked and when."""

import asyncio
import io
import json
from contextlib import asynccontextmanager

import grpc
import pytest
from rich.console import Console

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.client import bench_self
from scheduler_svc.client.bench import Bench, bench
from scheduler_svc.client.bench_report import comparison, headline, table
from scheduler_svc.client.load import Sending, Target
from scheduler_svc.client.measure import parse_slo
from scheduler_svc.client.workload import Job, Shape, Turn
from scheduler_svc.errors import StartupError


class Counting(inference_pb2_grpc.InferenceServiceServicer):
    """Streams one token a message once `gate` is open; refuses prompts that begin with 666."""

    def __init__(self):
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.most_running = 0
        self.arrived = asyncio.Semaphore(0)
        self.requests: list[pb.GenerateRequest] = []

    async def GetModel(self, request, context):
        return pb.GetModelResponse(model="tiny", vocab_size=1000, max_model_len=256, dtype="float32", device="cpu")

    async def Generate(self, request, context):
        self.requests.append(request)
        if request.token_ids.ids[0] == 666:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.arrived.release()
        try:
            await self.gate.wait()
            asked = request.stopping.max_tokens - (request.token_ids.ids[0] == 777)
            for number in range(asked):
                message = pb.GenerateResponse(token_ids=[number])
                if number == 0:
                    message.prompt.num_cached_tokens = 3
                yield message
        finally:
            self.running -= 1


@asynccontextmanager
async def serving():
    service = Counting()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def jobs(count: int, at_s: float | None = None, first: int = 300) -> list[Job]:
    return [Job(at_s, [first, 300 + number], 4) for number in range(count)]


async def run(address: str, work: list[Job], streams: int = 3):
    heard = []
    async with Target(address, Sending(streams), lambda record, new: heard.append(new)) as target:
        return await target.run(work), heard


async def test_a_closed_loop_keeps_its_streams_busy_and_no_more():
    async with serving() as (service, address):
        service.gate.clear()
        task = asyncio.create_task(run(address, jobs(10)))
        for _ in range(3):
            await service.arrived.acquire()
        assert service.running == 3
        service.gate.set()
        records, heard = await task
    assert service.most_running == 3
    assert [record.num_output for record in records] == [4] * 10
    assert all(record.is_whole and record.num_cached == 3 and record.end_s >= record.due_s for record in records)
    assert (heard.count(1), heard.count(0)) == (40, 10)


async def test_an_open_loop_does_not_wait_for_answers():
    async with serving() as (service, address):
        service.gate.clear()
        task = asyncio.create_task(run(address, jobs(20, at_s=0.0), streams=1))
        for _ in range(20):
            await service.arrived.acquire()
        assert service.running == 20
        service.gate.set()
        records, _ = await task
    # The wait counts from when a request was due, not from when it was sent.
    assert all(record.due_s == 0.0 and record.ttft_s > 0 for record in records)


async def test_requests_say_what_the_job_says():
    async with serving() as (service, address):
        await run(address, jobs(2))
        await run(address, jobs(1))
    first, second, third = service.requests
    assert sorted(request.token_ids.ids[1] for request in (first, second)) == [300, 301]
    assert first.stopping.max_tokens == 4
    assert first.stopping.ignore_eos
    assert first.sampling.temperature == 0.0
    # One run shares its cache with itself alone.
    assert first.cache_salt == second.cache_salt != third.cache_salt


async def test_refusals_and_short_answers_are_recorded():
    async with serving() as (_, address):
        work = jobs(1) + jobs(1, first=666) + jobs(1, first=777)
        records, _ = await run(address, work)
    assert [record.error for record in records] == ["", "RESOURCE_EXHAUSTED", "SHORT"]


async def test_nobody_there_is_one_line():
    with pytest.raises(StartupError, match=r"nothing answers on 127\.0\.0\.1:1"):
        async with Target("127.0.0.1:1", Sending(1), lambda *_: None) as target:
            await target.describe()


async def test_the_whole_run_writes_tables_and_a_file(tmp_path, capsys):
    shape = Shape(num_requests=12, prompt_tokens=8, output_tokens=5)
    async with serving() as (service, address):
        plan = Bench([address, address], shape, Sending(4), parse_slo("ttft:60000"), json_file=tmp_path / "b.json")
        results = await asyncio.to_thread(bench, plan)
    assert [result["summary"]["num_whole"] for result in results] == [12, 12]
    assert results[0]["summary"]["slo_met"] == 1.0
    # The same load twice, each after its own warm-up.
    assert len(service.requests) == 2 * (12 + 4)
    prompts = [sorted(tuple(r.token_ids.ids) for r in service.requests[i + 4 : i + 16]) for i in (0, 16)]
    assert prompts[0] == prompts[1]
    saved = json.loads((tmp_path / "b.json").read_text())
    assert saved["setting"]["shape"]["num_requests"] == 12
    assert len(saved["targets"][1]["requests"]) == 12
    printed = capsys.readouterr().out
    assert "tiny, float32 on cpu" in printed
    assert "TTFT" in printed
    assert "1.0" in printed


async def test_a_conversation_goes_on_from_what_was_answered():
    async with serving() as (service, address):
        records, _ = await run(address, [Job(None, [300, 301], 2, (Turn([302], 3),))])
    assert [record.num_output for record in records] == [2, 3]
    assert list(service.requests[1].token_ids.ids) == [300, 301, 0, 1, 302]
    assert records[1].due_s >= records[0].end_s


async def test_a_conversation_that_breaks_is_not_gone_on_with():
    async with serving() as (service, address):
        records, _ = await run(address, [Job(None, [666], 2, (Turn([302], 3), Turn([303], 3)))])
    assert [record.error for record in records] == ["RESOURCE_EXHAUSTED", "BROKEN_OFF", "BROKEN_OFF"]
    assert len(service.requests) == 1


async def test_a_sweep_draws_and_tells_each_rate(tmp_path, capsys):
    picture = tmp_path / "sweep.svg"
    shape = Shape(num_requests=6, prompt_tokens=8, output_tokens=3, rate=200.0)
    async with serving() as (_, address):
        plan = Bench([f"a={address}"], shape, Sending(4), {}, rates=[200.0, 400.0], duration_s=0.02, picture=picture)
        results = await asyncio.to_thread(bench, plan)
    assert [result["rate"] for result in results] == [200.0, 400.0]
    assert [result["summary"]["num_requests"] for result in results] == [4, 8]
    assert picture.stat().st_size > 1000
    text = capsys.readouterr().out
    assert f"a ({address})" in text
    assert text.count("requests/s, for ") == 2
    for result in results:
        # All that came, over the time in which it came: never less than what was served over the whole run.
        assert result["summary"]["offered_per_s"] >= result["summary"]["requests_per_s"]


async def test_one_run_and_two_targets_draw_too(tmp_path):
    shape = Shape(num_requests=4, prompt_tokens=8, output_tokens=3)
    async with serving() as (_, address):
        for name, targets in (("timeline", [address]), ("bars", [f"a={address}", f"b={address}"])):
            picture = tmp_path / f"{name}.png"
            await asyncio.to_thread(bench, Bench(targets, shape, Sending(4), {}, picture=picture))
            assert picture.stat().st_size > 1000


@pytest.mark.parametrize(("name", "says"), [("x.gif", "png or .svg"), ("none/x.png", "no such folder")])
def test_a_picture_that_cannot_be_is_said_before_the_load(tmp_path, name, says):
    with pytest.raises(StartupError, match=says):
        bench(Bench(["127.0.0.1:1"], Shape(), Sending(1), {}, picture=tmp_path / name))


def test_the_load_generator_measures_itself(monkeypatch):
    monkeypatch.setattr(bench_self, "TOKENS_PER_STREAM", 20)
    for test in bench_self.self_test():
        assert test.num_tokens == 20 * bench_self.NUM_STREAMS
        assert test.tokens_per_core_s > 0


async def test_the_file_that_cannot_be_written(tmp_path):
    async with serving() as (_, address):
        plan = Bench([address], Shape(num_requests=1), Sending(1), {}, json_file=tmp_path / "none" / "b.json")
        with pytest.raises(StartupError, match=r"cannot write .*No such file"):
            await asyncio.to_thread(bench, plan)


def test_tables_fit_eighty_columns():
    latency = {"mean": 123456.7, "p50": 123456.7, "p90": 123456.7, "p99": 123456.7}
    summary: dict = dict.fromkeys(("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"), latency)
    result = {
        "address": "127.0.0.1:50051",
        "summary": {**summary, "output_tokens_per_s": 98765.4, "requests_per_s": 0.0},
    }
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(table(result["summary"]))
    console.print(comparison([result, result]))
    assert "…" not in out.getvalue()
    assert all(len(line) <= 80 for line in out.getvalue().splitlines())


def test_the_headline_names_errors_and_goodput():
    numbers = ["output_tokens_per_s", "requests_per_s", "prompt_tokens_per_s", "duration_s", "client_cpu_share"]
    summary = dict.fromkeys(numbers, 0.5) | dict.fromkeys(["num_whole", "num_requests", "cached_tokens"], 1)
    summary |= {"prompt_tokens": 2, "tokens_per_message": 1.0, "errors": {"UNAVAILABLE": 3}}
    summary |= {"goodput_per_s": 0.25, "slo_met": 0.5, "slo_ms": {"ttft": 500.0}}
    text = headline(summary)
    assert "errors: UNAVAILABLE 3" in text
    assert "50.0 % met ttft:500 ms" in text

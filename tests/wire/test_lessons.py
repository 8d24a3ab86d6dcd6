"""What other inference servers got wrong in public, behind the frontend: what the scheduler takes from a socket."""

import ast
import asyncio
import pickle
import random
from pathlib import Path

import pytest

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import InvalidArgument, QueueFull
from scheduler_svc.links.messages import request_from_submit
from scheduler_svc.links.transport import decode
from tests.architecture.source import handwritten
from tests.wire.cluster import SchedulerThread, collect, request
from tests.wire.peers import ExecutorThread, RawDealer, executor_hello, expected_output, raw_context
from tests.wire.test_service import eventually, opened

SEED = 20_241_129


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 16, 17])
async def test_never_a_token_more_than_asked_for(tmp_path, max_tokens):
    """With steps under way, and around a block's end."""
    hello = executor_hello(block_size=16, max_num_batched_tokens=64)
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path, hello):
        async with opened(tmp_path) as made:
            tokens, ends = await collect(made.submit(request("a", [5, 6], max_tokens)))
            assert tokens[0] == expected_output([5, 6], max_tokens)
            assert ends[0].cause == session_pb2.FINISH_CAUSE_LENGTH


async def test_all_choices_are_queued_or_none(tmp_path):
    """Room for one more request, two requests of three choices: one of them waits, whole."""
    sampling = step_pb2.Sampling(temperature=1.0, repetition_penalty=1.0, top_p=1.0)
    with SchedulerThread(tmp_path, max_waiting=1) as scheduler:
        async with opened(tmp_path) as made:
            both = [made.submit(request(f"r{i}", [1], 3, num_choices=3, sampling=sampling)) for i in range(2)]
            with pytest.raises(QueueFull):
                await both[1].read()
            await eventually(lambda: scheduler.service._core.stats().num_waiting == 3)
            with ExecutorThread(tmp_path):
                tokens, _ = await collect(both[0])
            assert [len(tokens[i]) for i in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [([1] * 128, 1), ([1] * 4096, 1), ([1, 1000], 1), ([1, -1], 1), ([2**31 - 1], 1)]
)
async def test_limits_hold_for_whoever_comes_past_the_frontend(tmp_path, prompt, max_tokens):
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path):
        async with opened(tmp_path) as made:
            await eventually(lambda: made.ready)
            with pytest.raises(InvalidArgument):
                await made.submit(request("a", prompt, max_tokens)).read()
            tokens, _ = await collect(made.submit(request("b", [1], 2)))
            assert tokens[0] == expected_output([1], 2)


class Creates:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


async def test_a_pickle_is_only_bytes(tmp_path):
    made_by_pickle = tmp_path / "made"
    frame = pickle.dumps(Creates(made_by_pickle))
    pickle.loads(frame)
    assert made_by_pickle.exists()
    made_by_pickle.unlink()
    with SchedulerThread(tmp_path) as scheduler, ExecutorThread(tmp_path), raw_context() as context:
        for name in ("frontend", "executor", "beat"):
            RawDealer(context, f"ipc://{tmp_path}/{name}.sock", session_pb2.ToFrontend).send(frame)
        counts = scheduler.service._bad_frames.counts
        await eventually(lambda: all(counts.get(name) for name in ("frontend", "executor", "beat")))
        assert not made_by_pickle.exists()
        async with opened(tmp_path) as made:
            tokens, _ = await collect(made.submit(request("b", [1], 2)))
            assert tokens[0] == expected_output([1], 2)


def test_changed_submits_are_refused_or_understood():
    """Whatever a frontend gone mad may send: a request within bounds, a refusal, or nothing."""
    rng = random.Random(SEED)
    sampling = step_pb2.Sampling(
        temperature=0.5, top_p=0.9, top_k=3, repetition_penalty=1.1, bias_token_ids=b"\1\0\0\0", bias_values=b"\0" * 4,
        allowed_token_ids=b"\2\0\0\0", logprobs=2,
    )  # fmt: skip
    delivered = [session_pb2.Delivered(token_ids=b"\3\0\0\0", num_resumes=1)]
    good = request("name", [1, 2, 3], 5, sampling=sampling, delivered=delivered, tenant="t", cache_salt=b"s")
    frame = session_pb2.ToScheduler(submit=good).SerializeToString()
    fates = {"taken": 0, "refused": 0, "unread": 0}
    for _ in range(10_000):
        changed = bytearray(frame)
        for _ in range(rng.randint(1, 6)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        cut = rng.randrange(len(changed)) if rng.random() < 0.2 else len(changed)
        message = decode(session_pb2.ToScheduler, bytes(changed[:cut]))
        if message is None or message.WhichOneof("body") != "submit":
            fates["unread"] += 1
            continue
        try:
            made = request_from_submit(message.submit, 1, 0.0, 1000)
        except InvalidArgument:
            fates["refused"] += 1
        else:
            assert made.prompt.min() >= 0
            assert made.prompt.max() < 1000
            fates["taken"] += 1
    assert min(fates.values()) > 200, fates


async def test_deaf_and_silent_peers_hold_nobody_up(tmp_path):
    """Connected, and never reading or speaking."""
    with SchedulerThread(tmp_path), ExecutorThread(tmp_path), raw_context() as context:
        for name in ("frontend", "executor", "beat"):
            for _ in range(5):
                context.dealer(f"ipc://{tmp_path}/{name}.sock")
        async with opened(tmp_path) as made:
            streams = [made.submit(request(f"r{i}", [i + 1], 20)) for i in range(8)]
            for i, (tokens, _) in enumerate(await asyncio.gather(*map(collect, streams))):
                assert tokens[0] == expected_output([i + 1], 20)


def test_no_socket_broadcasts_and_no_hash_of_python_names_a_block():
    for module in handwritten():
        nodes = list(ast.walk(module.tree))
        sockets = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        assert not sockets & {"zmq.PUB", "zmq.SUB", "zmq.XPUB", "zmq.XSUB"}, module.name
        if module.name.startswith("scheduler_svc"):
            calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
            assert "hash" not in calls, module.name

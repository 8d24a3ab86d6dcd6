"""`python -m executor_svc` as a process: the options, the way it starts and the way it ends."""

import json
import os
import signal
import subprocess
import sys

import pytest
import zmq

from executor_svc.config import parse_bytes
from executor_svc.errors import StartupError
from executor_svc.identity import fingerprint
from protos.stepwire.wire.v1 import step_pb2
from tests.unit.executor.plans import admit, ints
from tests.unit.executor.test_simulated import spelled_out


def environment(**extra: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("STEPWIRE_")} | extra


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "executor_svc", *map(str, arguments)]


def refused(*arguments: object, **extra: str) -> tuple[int, str]:
    ends = ("--connect", "ipc:///nowhere/e", "--connect-beat", "ipc:///nowhere/b")
    done = subprocess.run(
        command(*ends, *arguments), env=environment(**extra), capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.fixture
def wire(tmp_path):
    """(router, arguments): the scheduler's end of the step socket, and how to reach it."""
    context = zmq.Context()
    router, beat = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
    for socket, name in ((router, "e"), (beat, "b")):
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{tmp_path}/{name}")
    yield router, ["--connect", f"ipc://{tmp_path}/e", "--connect-beat", f"ipc://{tmp_path}/b"]
    router.close()
    beat.close()
    context.term()


def receive(router: zmq.Socket, body: str) -> tuple[bytes, object]:
    """The next message of this kind; hellos may repeat."""
    while router.poll(120_000):
        peer, frame = router.recv_multipart()
        message = step_pb2.FromExecutor.FromString(frame)
        if message.WhichOneof("body") == body:
            return peer, getattr(message, body)
    raise AssertionError(f"no {body} came")


def test_a_life(wire, tmp_path):
    router, ends = wire
    ready = tmp_path / "ready.json"
    sizes = ["--num-blocks", 32, "--block-size", 4, "--max-model-len", 64, "--sim-vocab-size", 500]
    process = subprocess.Popen(
        command(*ends, "--backend", "simulated", *sizes, "--ready-file", ready),
        env=environment(STEPWIRE_MAX_NUM_SEQS="5"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        peer, hello = receive(router, "hello")
        shape = hello.geometry
        assert (shape.num_blocks, shape.block_size, shape.max_num_seqs, shape.max_model_len) == (32, 4, 5, 64)
        assert (shape.vocab_size, shape.max_num_batched_tokens) == (500, 2048)
        assert (hello.backend, hello.model.fingerprint) == ("simulated", fingerprint(None))
        start = step_pb2.ToExecutor(start_epoch=step_pb2.StartEpoch(boot_id=9, epoch=3))
        router.send_multipart([peer, start.SerializeToString()])
        prompt = [1, 2, 3, 4, 5]
        seat = step_pb2.StepPlan(boot_id=9, epoch=3, step_id=1, admit=[admit(2, prompt, [7, 8])], prefill=ints(2, 5))
        router.send_multipart([peer, step_pb2.ToExecutor(plan=seat).SerializeToString()])
        _, result = receive(router, "result")
        assert result.token_ids == ints(spelled_out(prompt, 500))
        assert (result.boot_id, result.epoch, result.step_id) == (9, 3, 1)
        assert json.loads(ready.read_text())["pid"] == process.pid
        bad = step_pb2.StepPlan(boot_id=9, epoch=3, step_id=2, release=ints(4))
        router.send_multipart([peer, step_pb2.ToExecutor(plan=bad).SerializeToString()])
        _, fault = receive(router, "fault")
        assert (fault.epoch, fault.step_id, fault.message) == (3, 2, "release: a row is not live")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "cpu"], "needs --model DIR"),
        (["--backend", "cpu", "--model", "/nowhere"], "--model /nowhere is not a directory"),
        (["--backend", "simulated", "--kv-memory", "lots"], "'lots' is not a size"),
        (["--backend", "simulated", "--num-blocks", "0"], "--num-blocks"),
        (["--backend", "simulated", "--model", "/nowhere"], "no config.json"),
        (["--backend", "abacus"], "abacus"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(arguments, message):
    status, line = refused(*arguments)
    assert status == 1
    assert line.startswith("stepwire executor: ")
    assert message in line


def test_a_misspelt_variable_stops_the_start():
    status, line = refused("--backend", "simulated", STEPWIRE_BLOCKSIZE="16")
    assert (status, "STEPWIRE_BLOCKSIZE" in line) == (1, True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512MiB", 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("4g", 4 * 10**9),
        ("2kib", 2048),
        ("10MB", 10**7),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "MiB", "1e9", "1 X", "nan"])
def test_sizes_that_are_none(text):
    with pytest.raises(StartupError, match="--kv-memory"):
        parse_bytes(text)


def test_the_fingerprint_is_of_config_and_tokenizer(tmp_path):
    import hashlib

    (tmp_path / "config.json").write_bytes(b"{}")
    assert fingerprint(tmp_path) == hashlib.sha256(b"config.json\0{}tokenizer.json\0").hexdigest()[:32]
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    assert fingerprint(tmp_path) == hashlib.sha256(b"config.json\0{}tokenizer.json\0[]").hexdigest()[:32]

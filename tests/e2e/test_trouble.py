"""What a user gets wrong: one clear line, an exit status that is not 0, never a traceback. And bytes nobody sent."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from tests.e2e.known_answers import LIMIT_S
from tests.e2e.server import Serve, free_port, generate_all, greedy


def serve_fails(*args: str, env: dict[str, str] | None = None) -> str:
    """Runs serve, expecting it to give up by itself; returns what it printed."""
    command = [sys.executable, "-m", "scheduler_svc.cli", "serve", "--port", str(free_port()), *args]
    command += [] if "--metrics-port" in args else ["--metrics-port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})
    text = done.stdout + done.stderr
    assert done.returncode not in (0, -9, -15), text
    assert "Traceback" not in text, text
    return text


@pytest.fixture
def broken_copy(tmp_path, default_model):
    """A copy of the default model's directory, its weights a link, for a test to spoil."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in default_model.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copy(path, folder / path.name)
    return folder


def test_a_missing_model_is_named():
    assert "/no/such/model" in serve_fails("--model", "/no/such/model")


def test_truncated_weights_are_named(broken_copy):
    weights = next(broken_copy.glob("*.safetensors"))
    data = weights.read_bytes()[:5_000_000]
    weights.unlink()
    weights.write_bytes(data)
    assert weights.name in serve_fails("--model", str(broken_copy))


def test_an_unknown_architecture_is_named(broken_copy):
    config = json.loads((broken_copy / "config.json").read_text())
    config |= {"architectures": ["QuuxForCausalLM"], "model_type": "quux"}
    (broken_copy / "config.json").write_text(json.dumps(config))
    text = serve_fails("--model", str(broken_copy))
    assert "quux" in text.lower()


def test_a_config_that_is_not_json(broken_copy):
    (broken_copy / "config.json").write_text("{ this is not json")
    assert "config.json" in serve_fails("--model", str(broken_copy))


def test_too_little_memory_for_one_sequence_says_what_to_do(default_model):
    text = serve_fails("--model", str(default_model), "--kv-memory", "1MiB")
    assert "max-model-len" in text or "max_model_len" in text
    assert "kv-memory" in text


def test_a_port_in_use_is_named(default_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in serve_fails("--model", str(default_model), "--backend", "simulated", "--port", port)


def test_an_unknown_variable_and_a_value_out_of_range_are_named():
    assert "STEPWIRE_COLOUR" in serve_fails(env={"STEPWIRE_COLOUR": "blue"})
    assert "port" in serve_fails("--port", "70000").lower()
    assert "frontends" in serve_fails(env={"STEPWIRE_FRONTENDS": "0"}).lower()


def test_garbage_on_every_socket_is_counted_and_dropped(tmp_path, default_model):
    import zmq

    with Serve(tmp_path, "--model", str(default_model), "--backend", "simulated") as serve:
        sockets = sorted(serve.runtime_sockets())
        assert len(sockets) >= 2
        context = zmq.Context()
        for path in sockets:
            with context.socket(zmq.DEALER) as dealer:
                dealer.linger = round(LIMIT_S * 1000)  # all of it arrives
                dealer.connect(f"ipc://{path}")
                for frame in (b"", b"\x00" * 7, b"\xff" * 1000, b"cos\nsystem\n(S'true'\ntR.", os.urandom(4096)):
                    dealer.send(frame)
                dealer.send_multipart([b"one", b"two", b"three"])
        context.term()
        (answer,) = generate_all(serve.addresses, [greedy([1, 2, 3], 20, ignore_eos=True)])
        assert len(answer.token_ids) == 20
        serve.wait_idle()
        limit = time.monotonic() + LIMIT_S
        while serve.metric("stepwire_bad_frames_total") < 10:
            assert time.monotonic() < limit
            time.sleep(0.05)

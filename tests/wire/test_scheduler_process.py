"""`python -m scheduler_svc` as an operator runs it: ready, refused, drained."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from scheduler_svc.config import KNOWN_VARIABLES, check_environment
from scheduler_svc.errors import StartupError

LIMIT_S = 120
ROOT = Path(__file__).parents[2]


def command(folder, *args: str) -> list[str]:
    return [sys.executable, "-m", "scheduler_svc", "--runtime-dir", str(folder / "run"), *args]


def fails(folder, *args: str, **env: str) -> str:
    done = subprocess.run(
        command(folder, *args), capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **env}
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture
def running(tmp_path):
    ready_file = tmp_path / "ready.json"
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        command(tmp_path, "--ready-file", str(ready_file), "--metrics-port", "0"), stdout=log, stderr=log
    )
    limit = time.monotonic() + LIMIT_S
    while not ready_file.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < limit
        time.sleep(0.02)
    yield process, json.loads(ready_file.read_text())
    if process.poll() is None:
        process.kill()
    process.wait()
    log.close()


def test_ready_then_drained_with_status_0(running, tmp_path):
    process, ready = running
    assert ready["pid"] == process.pid
    assert ready["frontend"] == f"ipc://{tmp_path}/run/frontend.sock"
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0


def test_a_second_scheduler_is_refused_naming_the_first(running, tmp_path):
    process, _ = running
    text = fails(tmp_path)
    assert f"pid {process.pid}" in text
    assert len(text.splitlines()) == 1
    assert process.poll() is None


def test_a_killed_scheduler_leaves_nothing_in_the_way(running, tmp_path):
    process, _ = running
    process.kill()
    process.wait()
    again = subprocess.Popen(command(tmp_path, "--ready-file", str(tmp_path / "again.json")), stderr=subprocess.DEVNULL)
    limit = time.monotonic() + LIMIT_S
    while not (tmp_path / "again.json").exists():
        assert again.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    again.terminate()
    assert again.wait(LIMIT_S) == 0


def test_values_out_of_range_and_unknown_variables_are_named(tmp_path):
    assert "pipeline-depth" in fails(tmp_path, "--pipeline-depth", "3")
    assert "max-waiting" in fails(tmp_path, STEPWIRE_MAX_WAITING="0")
    assert "inter-token-target" in fails(tmp_path, STEPWIRE_INTER_TOKEN_TARGET="61")
    assert "STEPWIRE_MAX_WAITIN" in fails(tmp_path, STEPWIRE_MAX_WAITIN="1")
    assert "log level" in fails(tmp_path, "--log-level", "loud")
    assert "insecure-wire" in fails(tmp_path, "--bind-frontend", "tcp://0.0.0.0:7000")


def test_metrics_are_served(tmp_path):
    from prometheus_client import CollectorRegistry

    from scheduler_svc.metrics import SchedulerMetrics

    port = SchedulerMetrics(CollectorRegistry()).serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as reply:
        text = reply.read().decode()
    names = (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("stepwire_blocks", "stepwire_preemptions_total", "stepwire_recomputed_tokens_total", "stepwire_epoch"),
        *("stepwire_prompt_tokens_total", "stepwire_generation_tokens_total", "stepwire_requests_total"),
        *("stepwire_plan_bytes", "stepwire_scheduler_step_seconds", "stepwire_executor_step_seconds"),
        *("stepwire_time_to_first_token_seconds", "stepwire_inter_token_seconds", "vllm:cache_config_info"),
    )
    assert [name for name in names if f"# HELP {name.removesuffix('_total')}" not in text] == []


def test_every_option_of_every_service_has_a_known_variable():
    sources = [path for service in ("scheduler_svc", "executor_svc") for path in (ROOT / service).rglob("*.py")]
    named = {name for path in sources for name in re.findall(r'envvar="(STEPWIRE_\w+)"', path.read_text())}
    assert named - KNOWN_VARIABLES == set()
    assert len(named) > 20


def test_known_variables_pass_and_a_near_miss_is_corrected():
    check_environment(KNOWN_VARIABLES, {"STEPWIRE_PORT": "1", "HOME": "x"})
    with pytest.raises(StartupError, match="did you mean STEPWIRE_POLICY"):
        check_environment(KNOWN_VARIABLES, {"STEPWIRE_POLICI": "1"})

"""A served model behind TLS and API keys, as a user sees it: the commands, two tenants, and what the log keeps."""

import os
import subprocess
import sys
import time

import grpc
import pytest
import trustme

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import channel
from tests.e2e.server import Serve, greedy

MARK = "xyzzyMARKER"
LIMIT_S = 90.0
PROMPT = [10 + i % 300 for i in range(200)]


def stepwire(*arguments: str, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scheduler_svc.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environ})


@pytest.fixture(scope="module")
def served(tmp_path_factory, default_model):
    """(serve, CA file, {tenant: key})"""
    folder = tmp_path_factory.mktemp("security")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    made = ca.issue_cert("127.0.0.1", "localhost")
    made.private_key_pem.write_to_path(folder / "tls.key")
    made.cert_chain_pems[0].write_to_path(folder / "tls.pem")
    keys = {}
    for tenant in ("acme", "globex"):
        keys[tenant] = stepwire("keys", "make", str(folder / "keys"), "--tenant", tenant).stdout.strip()
    options = ["--tls-cert", str(folder / "tls.pem"), "--tls-key", str(folder / "tls.key")]
    options += ["--api-keys", str(folder / "keys"), "--policy", "fair", "--verbose"]
    with Serve(folder, "--backend", "simulated", *options) as serve:
        yield serve, str(folder / "ca.pem"), keys


def test_the_commands_with_ca_and_key(served):
    serve, ca, keys = served
    there = {"STEPWIRE_ADDRESS": serve.addresses[0]}
    known = {**there, "STEPWIRE_TLS_CA": ca, "STEPWIRE_API_KEY": keys["acme"]}
    assert stepwire("health", "--tls-ca", ca, **there).stdout.strip() == "SERVING"
    done = stepwire("generate", "The sea is", "--max-tokens", "3", **known)
    assert (done.returncode, done.stderr) == (0, "")
    for environ, words in (
        (there, "--tls-ca"),
        ({**there, "STEPWIRE_TLS_CA": ca}, "--api-key KEY, or STEPWIRE_API_KEY"),
        ({**known, "STEPWIRE_API_KEY": keys["acme"][:-2] + "__"}, "the API key is not valid"),
    ):
        done = stepwire("generate", "The sea is", "--max-tokens", "3", **environ)
        assert done.returncode == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_serve_says_what_clients_need(served):
    serve, _, _ = served
    assert " --tls-ca FILE --api-key KEY" in serve.output()


def usage(served, tenant: str, **fields) -> pb.Usage:
    serve, ca, keys = served
    access = Access(keys[tenant], ca)
    request = greedy(PROMPT, 2, ignore_eos=True)
    request.MergeFrom(pb.GenerateRequest(**fields))
    with channel(serve.addresses[0], access) as opened:
        *_, last = InferenceServiceStub(opened).Generate(request, metadata=access.metadata, timeout=LIMIT_S)
    return last.usage


def settled(condition) -> None:
    """Metrics follow a moment later."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_tenant_never_meets_what_another_one_has_cached(served):
    serve, _, _ = served

    def computed() -> float:
        return serve.metric("stepwire_prompt_tokens_total", source="computed")

    assert usage(served, "acme").cached_tokens == 0
    assert usage(served, "acme").cached_tokens > 150
    settled(lambda: computed() > len(PROMPT))
    before = computed()
    assert usage(served, "globex").cached_tokens == 0
    settled(lambda: computed() != before)
    assert computed() - before == len(PROMPT)
    assert usage(served, "globex").cached_tokens > 150
    # A salt narrows the domain, and cannot name another tenant's.
    assert usage(served, "acme", cache_salt="mine").cached_tokens == 0
    assert usage(served, "globex", cache_salt="mine").cached_tokens == 0
    assert usage(served, "acme", cache_salt="mine").cached_tokens > 150


def test_the_log_of_every_service_keeps_no_text_and_no_forged_line(served):
    serve, ca, keys = served
    access = Access(keys["acme"], ca)
    told: list[str] = []
    with channel(serve.addresses[0], access) as opened:
        stub = InferenceServiceStub(opened)
        for request in (
            pb.GenerateRequest(text=MARK, request_id="plain"),
            pb.GenerateRequest(text=f"{MARK} " * 9000),
            pb.GenerateRequest(text=MARK, request_id=f"{MARK}\nERROR forged"),
            pb.GenerateRequest(text=MARK, cache_salt=MARK, model=MARK),
            pb.GenerateRequest(text=MARK, stopping=pb.StoppingCriteria(stop=[MARK, ""])),
        ):
            request.stopping.max_tokens = 2
            try:
                list(stub.Generate(request, metadata=access.metadata, timeout=LIMIT_S))
            except grpc.RpcError as error:
                told.append(error.details())
    assert len(told) == 4
    assert MARK not in "".join(told)
    log = serve.output()
    assert "frontend" in log
    assert MARK not in log
    assert "forged" not in log
    assert "Traceback" not in log
    assert not any(key[:-1] in log for key in keys.values())

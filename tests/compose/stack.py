"""One `docker compose` project for the tests: build, up, scale, kill, inspect. Skips where there is no engine."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass, field

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.architecture.source import ROOT

IMAGES = {
    "stepwire/scheduler:latest": "scheduler_svc/Dockerfile",
    "stepwire/executor:latest": "executor_svc/Dockerfile",
    "stepwire/balancer:latest": "deploy/envoy/Dockerfile",
}


def compose_command() -> list[str] | None:
    """`docker compose`, else docker-compose, else None; None too where no engine answers."""
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return None
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def build_images() -> None:
    """STEPWIRE_BUILD_ARGS: more arguments of `docker build`, such as --network host; "skip": they are there."""
    wanted = os.environ.get("STEPWIRE_BUILD_ARGS", "")
    if wanted == "skip":
        return
    for image, dockerfile in IMAGES.items():
        subprocess.run(["docker", "build", *wanted.split(), "-f", dockerfile, "-t", image, "."], cwd=ROOT, check=True)


@dataclass
class Stack:
    compose: list[str]
    project: str
    port: int
    environment: dict[str, str] = field(default_factory=dict)
    started_s: float = 0.0  # from `up` to the first answer, images built

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, *arguments: str, check: bool = True) -> str:
        command = [*self.compose, "-p", self.project, "-f", str(ROOT / "compose.yaml"), *arguments]
        environment = {**os.environ, **self.environment, "STEPWIRE_PORT": str(self.port)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, f"{' '.join(arguments)}: {done.stderr[-2000:]}"
        return done.stdout

    def containers(self, service: str = "") -> list[dict]:
        """`docker inspect` of the containers of a service, or of all."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [part for label in labels for part in ("--filter", label)]
        ids = docker("ps", "--all", "--quiet", *filters).split()
        return json.loads(docker("inspect", *ids)) if ids else []

    def running(self, service: str) -> list[dict]:
        return [c for c in self.containers(service) if c["State"]["Running"]]

    def kill(self, service: str, index: int = 0) -> None:
        docker("kill", self.running(service)[index]["Id"])

    def wait_serving(self, limit_s: float) -> float:
        """Seconds until a greedy completion came through the balancer."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < limit_s:
            with contextlib.suppress(grpc.RpcError):
                complete(self.address, "The sea is", 4, timeout_s=5)
                return time.monotonic() - began
            time.sleep(0.5)  # there is nothing to wait on but the answer itself
        raise AssertionError(f"no answer within {waited:.0f} s")


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr[-2000:]}"
    return done.stdout


def request(prompt: str, max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=prompt,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
    )


def complete(address: str, prompt: str, max_tokens: int, timeout_s: float) -> list[int]:
    with grpc.insecure_channel(address) as channel:
        stream = InferenceServiceStub(channel).Generate(request(prompt, max_tokens), timeout=timeout_s)
        return [token for message in stream for token in message.token_ids]


async def stream(channel: grpc.aio.Channel, prompt: str, max_tokens: int, timeout_s: float = 120) -> list[int]:
    tokens: list[int] = []
    async for message in InferenceServiceStub(channel).Generate(request(prompt, max_tokens), timeout=timeout_s):
        tokens.extend(message.token_ids)
    return tokens

"""`docker compose up` for real: hardening, isolation, scaling under load, the death of each container.

Run by `make test-compose`; skipped where no Docker engine answers.
"""

import asyncio
import time

import grpc
import pytest

from tests.compose.stack import complete, docker, stream

PROMPTS = [f"Story number {i}: once upon a time there was" for i in range(30)]
LENGTH = 96
SERVICES = ("balancer", "frontend", "scheduler", "executor")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def expected(stack):
    """What each prompt gives when nothing happens."""

    async def run():
        async with grpc.aio.insecure_channel(stack.address) as channel:
            return await asyncio.gather(*(stream(channel, prompt, LENGTH) for prompt in PROMPTS))

    return asyncio.run(run())


async def run_through(stack, event, expected):
    """30 streams from 10 connections; `event()` once all have begun. Every stream must be exactly right."""

    async def one(channel, prompt):
        return await stream(channel, prompt, LENGTH, timeout_s=180)

    channels = [grpc.aio.insecure_channel(stack.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(10)]
    try:
        tasks = [asyncio.create_task(one(channels[i % 10], prompt)) for i, prompt in enumerate(PROMPTS)]
        await asyncio.sleep(1.0)  # into their decoding
        await asyncio.to_thread(event)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for channel in channels:
            await channel.close()
    return results


def test_it_answers_within_a_minute(stack):
    print(f"from `up` to the first answer: {stack.started_s:.1f} s")
    assert len(complete(stack.address, "The sea is", 8, timeout_s=30)) == 8
    assert stack.started_s < 60


@pytest.mark.parametrize("service", [*SERVICES, "model", "keys"])
def test_containers_are_hardened(stack, service):
    for container in stack.containers(service):
        host = container["HostConfig"]
        assert host["ReadonlyRootfs"] is True
        assert [c.removeprefix("CAP_") for c in host["CapDrop"]] == ["ALL"]
        assert not host["CapAdd"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert host["Privileged"] is False
        assert host["Init"] is True
        assert host["Memory"] > 0
        assert host["PidsLimit"] > 0
        assert container["Config"]["User"] == "10001:10001"
        assert host["RestartPolicy"]["Name"] == ("no" if service in ("model", "keys") else "unless-stopped")
        if service in SERVICES:
            assert container["Config"]["Healthcheck"]["Test"][0] == "CMD"
            assert container["Config"]["StopTimeout"] is None or container["Config"]["StopTimeout"] >= 20
            assert any("title" in label for label in container["Config"]["Labels"])


def test_every_health_check_agrees(stack):
    deadline = time.monotonic() + 60
    while True:
        states = {s: [c["State"]["Health"]["Status"] for c in stack.running(s)] for s in SERVICES}
        if all(set(found) == {"healthy"} for found in states.values()):
            return
        assert time.monotonic() < deadline, states
        time.sleep(1)


def test_nothing_can_be_written_but_the_tmpfs(stack):
    for service in ("frontend", "scheduler", "executor"):
        (container, *_) = stack.running(service)
        probe = "touch /opt/x /models/x /keys/x 2>/dev/null; ls /opt/x /models/x /keys/x 2>/dev/null; true"
        assert docker("exec", container["Id"], "sh", "-c", probe).strip() == ""


def test_from_outside_only_the_balancer_answers(stack):
    """A container on the public network reaches port 50051 of the balancer, and nobody else's ports."""
    addresses = {}
    for service in SERVICES:
        (container, *_) = stack.running(service)
        networks = container["NetworkSettings"]["Networks"]
        addresses[service] = [network["IPAddress"] for network in networks.values()]
    targets = [(s, ip, port) for s, ips in addresses.items() for ip in ips for port in (50051, 5560, 5561, 5562, 9464)]
    script = (
        "import socket, sys\n"
        "for target in sys.argv[1:]:\n"
        "    service, ip, port = target.split(',')\n"
        "    try:\n"
        "        socket.create_connection((ip, int(port)), 0.5).close()\n"
        "        print(service, port)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    network = f"{stack.project}_outside"
    command = ["run", "--rm", "--network", network, "--entrypoint", "python", "stepwire/scheduler:latest", "-c", script]
    answered = docker(*command, *(",".join(map(str, target)) for target in targets)).split("\n")
    assert {line for line in answered if line} == {"balancer 50051"}


def test_scaling_up_and_down_under_load_fails_no_stream(stack, expected):
    try:
        up = lambda: stack.run("up", "--detach", "--no-build", "--scale", "frontend=3")  # noqa: E731
        assert asyncio.run(run_through(stack, up, expected)) == expected
        deadline = time.monotonic() + 60
        while len([c for c in stack.running("frontend") if c["State"]["Health"]["Status"] == "healthy"]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        # Streams, not connections, are spread: every frontend has seen some.
        assert asyncio.run(run_through(stack, lambda: None, expected)) == expected
        for container in stack.running("frontend"):
            probe = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
            text = docker("exec", container["Id"], "python", "-c", probe)
            line = 'stepwire_frontend_requests_total{finish_reason="length"}'
            assert float(next(x for x in text.splitlines() if x.startswith(line)).split()[-1]) > 0
    finally:
        down = lambda: stack.run("up", "--detach", "--no-build", "--scale", "frontend=1")  # noqa: E731
        results = asyncio.run(run_through(stack, down, expected))
    assert results == expected
    assert len(stack.running("frontend")) == 1


@pytest.mark.parametrize("service", ["executor", "scheduler"])
def test_the_death_of_a_container_behind_the_frontends_is_a_pause(stack, expected, service):
    before = {c["Id"]: c["RestartCount"] for c in stack.containers(service)}
    results = asyncio.run(run_through(stack, lambda: restart(stack, service), expected))
    assert results == expected
    assert stack.wait_serving(60) < 60
    assert before


def restart(stack, service):
    """`docker kill` counts as the operator's will, so the engine does not restart it: the operator does."""
    stack.kill(service)
    stack.run("up", "--detach", "--no-build", service)


def test_the_death_of_a_frontend_costs_only_its_own_streams(stack, expected):
    try:
        stack.run("up", "--detach", "--no-build", "--scale", "frontend=2")
        deadline = time.monotonic() + 60
        while len([c for c in stack.running("frontend") if c["State"]["Health"]["Status"] == "healthy"]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        results = asyncio.run(run_through(stack, lambda: stack.kill("frontend"), expected))
        lost = [r for r in results if isinstance(r, grpc.aio.AioRpcError)]
        assert all(r.code() is grpc.StatusCode.UNAVAILABLE for r in lost)
        assert [r for r, e in zip(results, expected, strict=True) if r != e and r not in lost] == []
        assert len(lost) < len(results)
        # The balancer has noticed: everything goes to the one that lives.
        assert asyncio.run(run_through(stack, lambda: None, expected)) == expected
    finally:
        stack.run("up", "--detach", "--no-build", "--scale", "frontend=1")


def test_the_death_of_the_balancer_is_unavailable_then_over(stack, expected):
    results = asyncio.run(run_through(stack, lambda: restart(stack, "balancer"), expected))
    wrong = [r for r, e in zip(results, expected, strict=True) if r != e]
    assert all(isinstance(r, grpc.aio.AioRpcError) and r.code() is grpc.StatusCode.UNAVAILABLE for r in wrong)
    assert stack.wait_serving(30) < 30

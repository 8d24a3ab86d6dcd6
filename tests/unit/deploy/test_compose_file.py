"""compose.yaml as text: every service is hardened, only the balancer is published, locks and constraints agree."""

import re

import pytest
import yaml

from tests.architecture.source import ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_hardened(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["init"] is True
    assert service["pids_limit"] > 0
    assert service["mem_limit"]
    assert "privileged" not in service
    assert "cap_add" not in service


def test_only_the_balancer_is_published_unless_a_profile_says_so():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    always = {name for name in published if "profiles" not in SERVICES[name]}
    assert always == {"balancer"}
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in published[name])


def test_the_wire_has_no_way_out():
    assert COMPOSE["networks"]["wire"]["internal"] is True
    assert COMPOSE["networks"]["inside"]["internal"] is True
    for name in ("scheduler", "executor", "executor-standby"):
        assert SERVICES[name]["networks"] == ["wire"]
    assert "outside" not in SERVICES["frontend"]["networks"]


def test_everybody_gets_the_model_read_only_but_the_one_that_fetches_it():
    writers = {
        name
        for name, service in SERVICES.items()
        if any(volume == "models:/models" for volume in service.get("volumes", []))
    }
    assert writers == {"model"}


def test_grace_exceeds_the_drain():
    for name in ("frontend", "scheduler"):
        drain = next(int(a.partition("=")[2]) for a in SERVICES[name]["command"] if a.startswith("--drain-timeout="))
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) > drain


def test_gpu_file_changes_only_the_executor():
    gpu = yaml.safe_load((ROOT / "deploy/compose.gpu.yaml").read_text())
    assert list(gpu["services"]) == ["executor"]
    devices = gpu["services"]["executor"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]


def pinned(text: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("extra", ["scheduler", "executor"])
def test_images_install_what_is_tested_together(extra):
    """`make lock` after a change of constraints.txt or pyproject.toml."""
    lock_text = (ROOT / f"deploy/locks/{extra}.txt").read_text()
    lock, constraints = pinned(lock_text), pinned((ROOT / "constraints.txt").read_text())
    assert {name: version for name, version in lock.items() if constraints.get(name, version) != version} == {}
    assert lock_text.count("--hash=sha256:") >= len(lock)
    project = (ROOT / "pyproject.toml").read_text()
    wanted = [re.search(r"^dependencies = (\[.*?\])$", project, re.MULTILINE | re.DOTALL)]
    wanted.append(re.search(rf"^{extra} = (\[.*?^\])", project, re.MULTILINE | re.DOTALL))
    names = [name for match in wanted for name in re.findall(r'"([A-Za-z0-9_.-]+?)\s*[><=;\["]', match[1])]
    missing = {re.sub(r"[-_.]+", "-", name).lower() for name in names} - set(lock) - {"torch", "triton"}
    assert missing == set()


SECRET = re.compile(r"(KEY|SECRET|TOKEN|PASSWORD)S?$")


def test_secrets_are_files_never_variables():
    """Who lists processes or inspects a container reads its environment."""
    for name, service in SERVICES.items():
        variables = service.get("environment", {})
        assert [v for v in variables if SECRET.search(v) and not v.endswith("_FILE")] == [], name
    for path in (ROOT / "deploy" / "k8s").rglob("*.yaml"):
        assert "secretKeyRef" not in path.read_text(), path
        assert "envFrom" not in path.read_text(), path

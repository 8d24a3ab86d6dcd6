"""The options of serve: a frozen list, checked values, the environment, what is passed on to whom."""

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor.config import build, child_environment
from scheduler_svc.supervisor.options import OPTIONS, Option

# The contract. Scripts rely on these names: adding one is a decision, renaming one breaks somebody.
FROZEN = (
    *(
        "model",
        "served-model-name",
        "host",
        "port",
        "frontends",
        "executors",
        "backend",
        "dtype",
        "kv-dtype",
        "block-size",
    ),
    *("num-blocks", "kv-memory", "gpu-memory-utilization", "max-model-len", "max-num-seqs", "max-num-batched-tokens"),
    *("max-waiting", "max-waiting-tokens", "max-waiting-per-tenant", "max-waiting-tokens-per-tenant", "max-wait"),
    *("inter-token-target", "policy", "pipeline-depth", "enable-prefix-caching", "drain-timeout"),
    *("max-executor-deaths", "restart-limit", "restart-window", "silence-limit", "tls-cert", "tls-key"),
    *("tls-client-ca", "api-keys", "metrics-port", "journal", "journal-limit", "journal-unmasked"),
    *("log-format", "trace-endpoint", "ready-file", "verbose"),
)


def test_the_list_of_options_is_frozen():
    assert [option.name for option in OPTIONS] == list(FROZEN)


def test_nothing_set_forwards_nothing():
    config = build({}, {"PATH": "/bin"})
    assert config.forwarded == {"scheduler": (), "executor": (), "frontend": ()}
    assert (config.host, config.ports, config.metrics_port) == ("127.0.0.1", [50051], None)


def test_each_child_gets_only_what_it_knows():
    arguments = {"max_waiting": "7", "dtype": "int8", "drain_timeout": "2.5"}
    forwarded = build({**arguments, "enable_prefix_caching": False}, {}).forwarded
    assert forwarded["scheduler"] == ("--max-waiting", "7", "--no-prefix-caching", "--drain-timeout", "2.5")
    assert forwarded["executor"] == ("--dtype", "int8")
    assert forwarded["frontend"] == ("--drain-timeout", "2.5")


def test_the_command_line_beats_the_environment():
    environ = {"STEPWIRE_PORT": "6000", "STEPWIRE_FRONTENDS": "2"}
    assert build({}, environ).ports == [6000, 6001]
    assert build({"port": "7000"}, environ).ports == [7000, 7001]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_also_a_variable(option):
    samples = {"int": str(max(1, option.low)), "float": "0.5", "text": "x", "size": "4GiB", "flag": "off"}
    samples["file"] = __file__
    # TLS is a pair of files, whatever else is asked of it.
    pair = {name: __file__ for name in ("STEPWIRE_TLS_CERT", "STEPWIRE_TLS_KEY") if option.name.startswith("tls-")}
    environ = pair | {option.variable: samples.get(option.kind, option.kind.split("|")[0])}
    if not option.in_service:
        with pytest.raises(StartupError, match=f"^{option.variable} is not in this version: leave it out$"):
            build({}, environ)
        return
    config = build({}, environ)
    for part in option.parts:
        assert f"--{option.off_name if option.kind == 'flag' else option.name}" in config.forwarded[part]


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("port", "65536", "--port 65536 is out of range: 0 to 65535"),
        ("port", "-1", "--port -1 is out of range: 0 to 65535"),
        ("port", "http", "--port 'http' is not a whole number"),
        ("max_model_len", "1", "--max-model-len 1 is out of range: 2 to 16777216"),
        ("max_wait", "0", "--max-wait 0 is out of range: 0.001 to 86400"),
        ("max_wait", "86401", "--max-wait 86401 is out of range: 0.001 to 86400"),
        ("inter_token_target", "0.0009", "--inter-token-target 0.0009 is out of range: 0.001 to 60"),
        ("inter_token_target", "61", "--inter-token-target 61 is out of range: 0.001 to 60"),
        ("max_waiting_per_tenant", "0", "--max-waiting-per-tenant 0 is out of range: 1 to 1000000"),
        ("frontends", "0", "--frontends 0 is out of range: 1 to 64"),
        ("gpu_memory_utilization", "0", "--gpu-memory-utilization 0 is out of range: 0.05 to 1"),
        ("gpu_memory_utilization", "1.01", "--gpu-memory-utilization 1.01 is out of range: 0.05 to 1"),
        ("drain_timeout", "nan", "--drain-timeout nan is out of range: 0 to 86400"),
        ("drain_timeout", "inf", "--drain-timeout inf is out of range: 0 to 86400"),
        ("backend", "gpu", "--backend 'gpu' is not one of auto, cuda, cpu, simulated"),
        ("kv_memory", "lots", "--kv-memory 'lots' is not a size: write bytes or a number with a unit, as in 4GiB"),
        ("model", " ", "--model is empty: give it a value or leave it out"),
        ("api_keys", "/nonexistent", "--api-keys '/nonexistent' is not a file that can be read"),
        ("tls_cert", __file__, "--tls-cert needs --tls-key as well"),
        ("tls_client_ca", __file__, "--tls-client-ca needs --tls-cert as well"),
    ],
)
def test_a_bad_value_is_one_line_naming_option_and_range(key, text, message):
    with pytest.raises(StartupError) as caught:
        build({key: text}, {})
    assert str(caught.value) == message


def test_a_bad_variable_is_named_as_the_variable():
    with pytest.raises(StartupError, match=r"^STEPWIRE_PIPELINE_DEPTH 3 is out of range: 1 to 2$"):
        build({}, {"STEPWIRE_PIPELINE_DEPTH": "3"})
    with pytest.raises(StartupError, match=r"^STEPWIRE_ENABLE_PREFIX_CACHING 'maybe' is not one of"):
        build({}, {"STEPWIRE_ENABLE_PREFIX_CACHING": "maybe"})


def test_an_unknown_variable_stops_the_start_and_is_named():
    with pytest.raises(StartupError, match="unknown environment variable STEPWIRE_PROT: did you mean STEPWIRE_PORT"):
        build({}, {"STEPWIRE_PROT": "1"})


def test_variables_of_one_service_are_known_and_go_to_it_alone(monkeypatch):
    environ = {"STEPWIRE_CACHE": "/somewhere", "STEPWIRE_STEP_TIMEOUT": "9", "STEPWIRE_PORT": "1", "OTHER": "x"}
    build({}, environ)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    seen = {part: child_environment(part, {"MORE": "y"}) for part in ("scheduler", "executor", "frontend")}
    ours = {part: {k for k in variables if k.startswith("STEPWIRE_")} for part, variables in seen.items()}
    assert ours == {"scheduler": {"STEPWIRE_STEP_TIMEOUT"}, "executor": set(), "frontend": set()}
    assert all(variables["OTHER"] == "x" and variables["MORE"] == "y" for variables in seen.values())


def test_ports_count_up_and_stay_below_65536():
    assert build({"port": "65534", "frontends": "2"}, {}).ports == [65534, 65535]
    with pytest.raises(StartupError, match="--port 65534 with --frontends 3 would pass port 65535"):
        build({"port": "65534", "frontends": "3"}, {})
    assert build({"port": "0", "frontends": "3"}, {}).ports == [0, 0, 0]


def test_a_file_that_is_not_there_is_refused():
    option = Option("tls-cert", "file", "")
    with pytest.raises(StartupError, match=r"^--tls-cert '/nonexistent' is not a file that can be read$"):
        option.parse("/nonexistent", "--tls-cert")
    assert option.parse(__file__, "--tls-cert") == __file__


def test_the_metrics_port_is_no_frontends_port():
    arguments = {"port": "6000", "frontends": "2"}
    for port in (5999, 6002):
        assert build({**arguments, "metrics_port": str(port)}, {}).metrics_port == port
    for port in (6000, 6001):
        with pytest.raises(
            StartupError, match=rf"^--metrics-port {port} is one of the frontends' ports: choose another$"
        ):
            build({**arguments, "metrics_port": str(port)}, {})

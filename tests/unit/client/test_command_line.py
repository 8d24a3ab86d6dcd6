"""What the `stepwire` command says by itself."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from scheduler_svc.cli import app
from scheduler_svc.errors import StartupError


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_its_version():
    try:
        told = f"stepwire {version('stepwire')}\n"
    except PackageNotFoundError:
        told = "stepwire, run from its sources without being installed\n"
    assert run("--version") == (0, told)


@pytest.mark.parametrize("group", [(), ("model",)])
def test_every_command_is_told_in_a_whole_sentence(group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, text = run(*group, "--help")
    assert status == 0
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
@pytest.mark.parametrize(
    ("option", "limit"), [("--max-tokens", 2**32 - 1), ("--top-k", 2**32 - 1), ("--seed", 2**64 - 1)]
)
def test_a_number_that_no_field_holds_is_refused_by_name(command, option, limit):
    for value in (-1, limit + 1):
        status, text = run(*command, "--address", "127.0.0.1:1", option, str(value))
        assert status == 2
        assert f"'{option}': {value} is not within 0..{limit}" in text
    status, text = run(*command, "--address", "127.0.0.1:1", option, str(limit))
    assert status == 1  # nobody answers there
    assert option not in text


@pytest.mark.parametrize(
    "words", [("generate", "\udcff"), ("generate", "hi", "--stop", "\udcff"), ("chat", "--system", "\udcff")]
)
def test_bytes_that_are_no_text_are_refused(words):
    with pytest.raises(StartupError, match="is not text in UTF-8"):
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    with pytest.raises(StartupError, match="the prompt, or --stop, is not text in UTF-8"):
        CliRunner().invoke(app, ["generate"], input=b"\xff", catch_exceptions=False)


def test_an_empty_cache_says_where_it_is_and_how_it_fills(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    status, text = run("model", "list")
    assert status == 0
    assert text == f"no models in {tmp_path / 'models'} yet: `stepwire model fetch` gets the default one\n"

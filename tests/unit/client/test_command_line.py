"""What the `stepwire` command says by itself."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from scheduler_svc.cli import app


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


def test_an_empty_cache_says_where_it_is_and_how_it_fills(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path))
    status, text = run("model", "list")
    assert status == 0
    assert text == f"no models in {tmp_path / 'models'} yet: `stepwire model fetch` gets the default one\n"

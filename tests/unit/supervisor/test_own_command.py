"""The command that the ready line offers is one that works where serve was started."""

import os

import pytest

from scheduler_svc.supervisor.serve import own_command


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An environment's stepwire in .venv/bin of the working directory, not on the path."""
    program = tmp_path / ".venv" / "bin" / "stepwire"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_off_the_path_it_is_the_file(place):
    assert own_command(".venv/bin/stepwire") == ".venv/bin/stepwire"
    assert own_command(str(place)) == ".venv/bin/stepwire"


def test_from_elsewhere_it_is_the_whole_path(place, monkeypatch):
    os.mkdir("sub")
    monkeypatch.chdir("sub")
    assert own_command(str(place)) == str(place)


def test_on_the_path_it_is_the_name(place, monkeypatch):
    monkeypatch.setenv("PATH", str(place.parent))
    assert own_command(str(place)) == "stepwire"


def test_another_program_says_only_the_name(place):
    assert own_command("/x/pytest") == own_command("-c") == own_command("/gone/stepwire") == "stepwire"

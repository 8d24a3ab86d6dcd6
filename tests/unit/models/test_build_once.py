"""Directories that are there and whole, or not there: interruption, death, two builders at once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.models.atomic import build_once, point_link
from scheduler_svc.models.progress import silent

# Says what it does and waits to be told to go on, so that the test decides every order of events.
BUILDER = """
import sys
from pathlib import Path
from scheduler_svc.models.atomic import build_once
from scheduler_svc.models.progress import SilentProgress

class Spoken(SilentProgress):
    def note(self, line):
        print("waiting", flush=True)

def build(directory):
    (directory / "half").write_text("half")
    print("building", flush=True)
    sys.stdin.readline()
    (directory / "whole").write_text(sys.argv[2])

target = Path(sys.argv[1])
build_once(target, lambda path: (path / "whole").exists(), build, Spoken())
print("done", (target / "whole").read_text(), flush=True)
"""


def start(target: Path, name: str) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(target), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    return process.communicate("go\n", timeout=60)[0]


def is_whole(path: Path) -> bool:
    return (path / "whole").exists()


def build(directory: Path) -> None:
    (directory / "whole").write_text("ours")


def leftovers(target: Path) -> list[str]:
    return [path.name for path in target.parent.iterdir() if ".part-" in path.name]


def test_two_at_once_build_once(tmp_path):
    target = tmp_path / "cache" / "model"
    first = start(target, "first")
    assert first.stdout.readline() == "building\n"
    second = start(target, "second")
    assert second.stdout.readline() == "waiting\n"
    assert not target.exists()
    assert finish(first) == "done first\n"
    assert finish(second) == "done first\n"
    assert leftovers(target) == []


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path):
    target = tmp_path / "model"
    process = start(target, "first")
    assert process.stdout.readline() == "building\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not target.exists()
    assert len(leftovers(target)) == 1
    build_once(target, is_whole, build, silent)
    assert sorted(path.name for path in target.iterdir()) == ["whole"]
    assert leftovers(target) == []


def test_a_waiting_builder_takes_over_from_a_killed_one(tmp_path):
    target = tmp_path / "model"
    first = start(target, "first")
    assert first.stdout.readline() == "building\n"
    second = start(target, "second")
    assert second.stdout.readline() == "waiting\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert finish(second) == "building\ndone second\n"
    assert leftovers(target) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, StartupError("no"), ZeroDivisionError])
def test_an_interrupted_builder_cleans_up(tmp_path, error):
    def broken(directory):
        (directory / "half").write_text("half")
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        build_once(tmp_path / "model", is_whole, broken, silent)
    assert not (tmp_path / "model").exists()
    assert leftovers(tmp_path / "model") == []


def test_a_full_disk_is_one_line(tmp_path):
    def full(_directory):
        raise OSError(28, "No space left on device")

    with pytest.raises(StartupError, match=r"cannot write the model to .*: No space left on device"):
        build_once(tmp_path / "model", is_whole, full, silent)


def test_a_damaged_target_is_replaced(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    build_once(target, is_whole, build, silent)
    assert sorted(path.name for path in target.iterdir()) == ["whole"]


def test_a_whole_target_is_left_alone(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "whole").write_text("kept")
    build_once(target, is_whole, build, silent)
    assert (target / "whole").read_text() == "kept"
    # Nothing was written beside it either: a read-only cache works.
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cannot create .*STEPWIRE_CACHE"):
        build_once(tmp_path / "file" / "cache" / "model", is_whole, build, silent)


def test_a_link_is_made_moved_and_never_missing(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    link = tmp_path / "deep" / "current"
    for target in (first, second, second):
        point_link(link, target)
        assert link.resolve() == target
    assert [path.name for path in link.parent.iterdir()] == ["current"]


def test_a_link_does_not_replace_what_is_no_link(tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(StartupError, match="no symbolic link"):
        point_link(tmp_path / "precious", tmp_path)
    assert (tmp_path / "precious").read_text() == "data"

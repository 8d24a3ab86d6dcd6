"""Other people's tools, each in an environment of its own: made when first asked for, kept in the user's cache.

Nothing of theirs ever comes into the environment that the tests run in. Where the package index cannot be reached, what
needs a tool is skipped, and says so.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALL_LIMIT_S = 240
_UNREACHABLE = (
    "Could not find a version",
    "No matching distribution",
    "ConnectionError",
    "Max retries",
    "timed out",
    "ProtocolError",
    "IncompleteRead",
    "HTTP error",
)


def cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stepwire-test-tools"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two test runs do not install the same tool at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python_tool(name: str, *requirements: str) -> Path:
    """The bin folder of an environment with `requirements`, which name exact versions; skips where there is none."""
    folder = cache() / "-".join([f"py{sys.version_info[0]}{sys.version_info[1]}", *requirements]).replace("==", "-")
    done = folder / ".installed"
    with _alone(folder):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)], name)
            install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
            _run([*install, "--disable-pip-version-check", *requirements], name)
            done.touch()
    return folder / "bin"


def node_packages(source: Path) -> Path:
    """A copy of the Node project in `source` with its packages installed; skips without Node or its registry."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("Node is not installed")
    stamp = hashlib.sha256((source / "package.json").read_bytes()).hexdigest()[:16]
    folder = cache() / f"node-{stamp}"
    with _alone(folder):
        if not (folder / ".installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for path in source.glob("package*.json"):
                shutil.copy(path, folder)
            _run(
                [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)],
                "Node packages",
            )
            (folder / ".installed").touch()
    return folder


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} could not be installed within {INSTALL_LIMIT_S} s")
    if done.returncode == 0:
        return
    if any(sign in done.stderr + done.stdout for sign in (*_UNREACHABLE, "ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT")):
        pytest.skip(f"{name} cannot be installed here: its registry does not have it or is out of reach")
    raise AssertionError(f"installing {name} failed:\n{done.stderr[-2000:]}")

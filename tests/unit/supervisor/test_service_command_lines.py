"""`python -m scheduler_svc` and `... .frontend`: a wrong option or variable is one line that names it, and status 1."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["scheduler_svc", "scheduler_svc.frontend"])
@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        (["--drain-timeout", "-1"], {}, "--drain-timeout"),
        ([], {"STEPWIRE_DRAIN_TIMEOUT": "soon"}, "STEPWIRE_DRAIN_TIMEOUT"),
        ([], {"STEPWIRE_COLOUR": "blue"}, "STEPWIRE_COLOUR"),
        (["--nothing-like-it"], {}, "--nothing-like-it"),
        (["--log-level", "loud"], {}, "loud"),
    ],
)
def test_a_wrong_start_is_one_line(module, arguments, variables, named):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEPWIRE_")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=kept | variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("stepwire: ")
    assert named in line


def test_help_is_no_fault():
    command = [sys.executable, "-m", "scheduler_svc", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "--drain-timeout" in done.stdout

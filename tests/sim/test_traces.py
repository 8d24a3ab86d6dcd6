"""The golden traces say what they said. After a change that is meant: `python -m tests.sim.trace
tests/sim/traces/*.txt`, then read the difference."""

from pathlib import Path

import pytest

from tests.sim.trace import TRACES, play


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.txt")), ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    assert play(path) == path.read_text()

"""Runs the interpreted kernel tests in a process of their own, so that a plain `pytest tests` includes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_interpreted(selection: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-x", "-m", selection, str(HERE / "interpreted")]
    done = subprocess.run(command, env=env, cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.interpreter
def test_kernels_agree_with_their_specification() -> None:
    run_interpreted("not slow")


@pytest.mark.interpreter
@pytest.mark.slow
def test_kernels_agree_with_their_specification_on_the_large_matrix() -> None:
    run_interpreted("slow")

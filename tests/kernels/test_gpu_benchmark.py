"""The GPU benchmark's script runs from end to end without a GPU; its figures mean nothing then, its checks do."""

import json
import subprocess
import sys
from pathlib import Path


def test_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu_dry.json").read_text())["rows"]
    sections = {"attention", "ceilings", "correctness", "decode", "elementwise", "peers", "prefill", "sampling"}
    assert {row["section"] for row in rows} == sections | {"serving", "step"}
    served = next(row for row in rows if row["section"] == "serving")
    # Two streams of three tokens, prefilled and decoded through scheduler and wire.
    assert served["steps"] >= 3
    assert (tmp_path / "gpu_dry.png").stat().st_size > 0
    assert all(row.get("ok", True) for row in rows)

"""What share of a step is what: matrix products, attention, the rest of the model, sampling, the executor around it,
the scheduler, the wire; and the CPU time of every process.

    python -m benchmarks.shares [--dtypes bfloat16 int8] [--workloads W1 W2] [--json FILE]

Real services on this machine, clocks within the executor. A step begins with its plan and ends with its answer; what
passes between two steps is the scheduler's planning and committing, which tells its own time, and the wire. The clocks
of the engine run on the calling thread: the parts of `forward` are its wall time in their proportion.
"""

import argparse
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.frontend_client import cpu_seconds
from benchmarks.frontend_rig import Cores, Rig
from benchmarks.serving import at_once, measure, run_workload
from benchmarks.workload import mixed
from tests.e2e.server import Answering, free_port


class ClockedRig(Rig, Answering):
    """A frontend, the scheduler, which tells its metrics, and the executor with clocks in it."""

    def __init__(self, folder: Path, dtype: str):
        super().__init__(folder, frontends=1, rows=0, step_s=0.0)
        everything = frozenset(core for cores in (self.cores.engine, self.cores.client) for core in cores)
        self.cores = Cores(everything, (everything,), everything, False)
        self.report, self._dtype = folder / "shares.json", dtype
        port = free_port()
        self.metrics_urls = [f"http://127.0.0.1:{port}/metrics"]
        self.scheduler_flags = ("--metrics-port", str(port))

    def _start_executor(self, job: dict[str, Any]) -> None:
        self._executor = self._run(
            self.cores.engine,
            "benchmarks.shares_executor",
            job=job | {"dtype": self._dtype, "report": str(self.report)},
        )

    def count_from_now(self) -> None:
        self._executor.send_signal(signal.SIGUSR1)

    def stop_executor(self) -> dict[str, Any]:
        """What its clocks say."""
        self._executor.send_signal(signal.SIGTERM)
        self._executor.wait(30)
        return json.loads(self.report.read_text(encoding="utf-8"))

    def cpu_seconds(self) -> dict[str, float]:
        processes = {"executor": self._executor, "scheduler": self._scheduler}
        pids = {name: process.pid for name, process in processes.items()} | {"frontend": self.pids[0]}
        return {name: cpu_seconds(pid) for name, pid in pids.items()}

    def scheduler_seconds(self) -> float:
        """Planning and committing, since it started."""
        return self.metric("stepwire_scheduler_step_seconds_sum")


def run(dtype: str, workload: str, seed: int) -> dict[str, Any]:
    """One workload once, after four requests that warm everything up."""
    with tempfile.TemporaryDirectory() as folder, ClockedRig(Path(folder), dtype) as rig:
        measure(rig.addresses[0], at_once(mixed(4, seed + 77)))
        rig.count_from_now()
        planned, used = rig.scheduler_seconds(), rig.cpu_seconds()
        run_workload(workload, rig.addresses[0], seed, 0, 0.0)
        planned = rig.scheduler_seconds() - planned
        used = {name: seconds - used[name] for name, seconds in rig.cpu_seconds().items()}
        found = rig.stop_executor()
    return {"dtype": dtype, "workload": workload, "shares": shares_of(found, planned), "cpu_seconds": used, **found}


def shares_of(found: dict[str, Any], planned: float) -> dict[str, float]:
    """Parts of the wall time from the first plan to the last answer; they add up to 1."""
    seconds, operations, wall = found["seconds"], found["operations"], found["wall"]
    counted = sum(operations.values())
    forward = {name: seconds["forward"] * value / counted for name, value in operations.items()} if counted else {}
    products, attention = forward.pop("linear", 0.0), forward.pop("attention", 0.0)
    between = max(0.0, wall - seconds["step"])
    parts = {
        "matrix products": products,
        "attention": attention,
        "other operations": sum(forward.values()) if counted else seconds["forward"],
        "sampling": seconds["sampling"],
        "executor around it": seconds["step"] - seconds["forward"] - seconds["sampling"],
        "scheduler": min(planned, between),
        "wire and waiting": max(0.0, between - planned),
    }
    return {name: value / wall for name, value in parts.items()}


def show(row: dict[str, Any]) -> str:
    parts = "  ".join(f"{name} {share:.1%}" for name, share in row["shares"].items())
    cpu = "  ".join(f"{name} {seconds:.2f}" for name, seconds in row["cpu_seconds"].items())
    head = f"{row['dtype']} {row['workload']}: {row['steps']} steps, {row['tokens']} tokens in {row['wall']:.1f} s"
    return f"{head}\n  share of the wall time: {parts}\n  CPU seconds: {cpu}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--workloads", nargs="+", choices=("W1", "W2", "W3"), default=["W1", "W2"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for dtype in options.dtypes:
        for workload in options.workloads:
            rows.append(run(dtype, workload, options.seed))
            print(show(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

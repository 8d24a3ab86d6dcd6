"""The real CPU executor, with clocks in it, a process of its own.

    python -m benchmarks.shares_executor < job.json

Job: {"endpoint", "beat", "model", "dtype", "report"}. From the first plan after SIGUSR1 on it counts; SIGTERM ends it,
and the report, a JSON file, says where the seconds between the first plan and the last answer went.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.config import quiet_threads

quiet_threads()

import numpy as np

from executor_svc.backends.cpu import CpuBackend, make_cpu
from executor_svc.config import Dtype, ExecutorConfig
from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.model import native
from executor_svc.model.native_decoder import NativeDecoder
from executor_svc.serve import hello_of
from executor_svc.startup import Startup
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2


class Clocks:
    """Seconds by part. `step` holds all of a step from its plan to its answer, `forward` and `sampling` are in it."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        backend._decoder.forward = self._timed("forward", backend._decoder.forward)  # type: ignore[method-assign]
        backend._sampler.sample = self._timed("sampling", backend._sampler.sample)  # type: ignore[method-assign]
        self.clear()

    def clear(self) -> None:
        self.seconds = {"step": 0.0, "forward": 0.0, "sampling": 0.0}
        self.num_steps = self.num_tokens = 0
        self.began = self.ended = 0.0
        self.parts = np.zeros(len(native.CODE_NAMES), np.int64)
        decoder = self._backend._decoder
        if isinstance(decoder, NativeDecoder):
            decoder.nanoseconds = self.parts

    def _timed(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = act(*arguments)
            self.seconds[name] += time.perf_counter() - began
            return result

        return run

    def step(self, _: step_pb2.StepPlan, result: step_pb2.StepResult) -> None:
        self.ended = time.perf_counter()
        self.began = self.began or self.ended - result.forward_us / 1e6
        self.seconds["step"] += result.forward_us / 1e6
        self.num_steps += 1
        self.num_tokens += len(result.token_ids) // 4

    def report(self) -> dict[str, Any]:
        parts = {name: value / 1e9 for name, value in zip(native.CODE_NAMES, self.parts.tolist(), strict=True)}
        return {"seconds": self.seconds, "operations": parts, "wall": self.ended - self.began} | {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
        }


def main() -> None:
    job = json.load(sys.stdin)
    backend = make_cpu(ExecutorConfig(model=Path(job["model"]), dtype=Dtype(job["dtype"])), Startup())
    clocks = Clocks(backend)
    with ExecutorLink(hello_of(backend), LinkSettings(job["endpoint"], job["beat"])) as link:
        signal.signal(signal.SIGTERM, lambda *_: link.stop())
        signal.signal(signal.SIGUSR1, lambda *_: clocks.clear())
        Worker(backend, observe=clocks.step).serve(link)
    Path(job["report"]).write_text(json.dumps(clocks.report()), encoding="utf-8")


if __name__ == "__main__":
    main()

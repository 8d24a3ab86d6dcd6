"""An executor without work, a process of its own: waits the time of a step, draws the moment as every row's token.

    python -m benchmarks.frontend_executor < job.json

Job: {"endpoint", "beat", "model", "palette", "step_s", "rows"}. The link, the rows and the batches are the real ones.
"""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stamps import ticks
from executor_svc.backends.base import AtOnce, StepOutput
from executor_svc.batch import ForwardBatch
from executor_svc.identity import fingerprint
from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.serve import hello_of
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2

MAX_MODEL_LEN = 1 << 15
BLOCK_SIZE = 16
GATHERING_STEP_S = 0.05


class StampingBackend(AtOnce):
    name = "simulated"
    device = "none"

    def __init__(self, job: dict[str, Any]):
        rows = job["rows"]
        self._palette = np.array(job["palette"], np.int32)
        # Steps are slow until every row is taken: streams that find a frontend saturated by others begin late.
        self._step_s = max(job["step_s"], GATHERING_STEP_S)
        self._full_step_s = job["step_s"]
        self._ends_at = time.perf_counter()
        self.geometry = step_pb2.Geometry(
            num_blocks=(rows + 1) * MAX_MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=rows,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=4096,
            vocab_size=int(self._palette.max()) + 1,
        )
        self.identity = step_pb2.ModelIdentity(
            architecture="stamps", dtype="none", kv_dtype="none", fingerprint=fingerprint(Path(job["model"]))
        )

    def reset(self) -> None:
        pass

    def copy_blocks(self, pairs: np.ndarray) -> None:
        pass

    def run(self, batch: ForwardBatch) -> StepOutput:
        """Steps end at a steady beat; one that comes too late for it begins another."""
        now = time.perf_counter()
        self._ends_at = max(self._ends_at, now - self._step_s) + self._step_s
        if self._ends_at > now:
            time.sleep(self._ends_at - now)
        num_sampled = int(np.count_nonzero(batch.sampled))
        if num_sampled == self.geometry.max_num_seqs:
            self._step_s = self._full_step_s
        token = self._palette[ticks() % len(self._palette)]
        return StepOutput(np.full(num_sampled, token, np.int32))


def main() -> None:
    job = json.load(sys.stdin)
    backend = StampingBackend(job)
    with ExecutorLink(hello_of(backend), LinkSettings(job["endpoint"], job["beat"])) as link:
        signal.signal(signal.SIGTERM, lambda *_: link.stop())
        Worker(backend).serve(link)


if __name__ == "__main__":
    main()

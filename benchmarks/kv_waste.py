"""How much KV memory holds no token: blocks allocated on demand against reserving `max_model_len` for everyone.

    python -m benchmarks.kv_waste [--requests 400] [--mean 500] [--block-size 16] [--json FILE]

The real scheduler core plans a mixed run (prompts and outputs log-normal, total around --mean) against an executor that
only counts. After every step: waste = 1 - tokens stored / slots in owned blocks, averaged over steps. Reservation would
hold max_model_len slots for each running sequence.
"""

import argparse
import json
import random
from pathlib import Path

import numpy as np

from benchmarks.workload import log_normal
from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Request
from scheduler_svc.core.scheduler import Scheduler


class Counter:
    """An executor without arithmetic: follows plans row by row and answers token 1."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}

    def run(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        for row in np.frombuffer(plan.release, "<i4").tolist():
            del self.known[row], self.computed[row]
        for admit in plan.admit:
            self.known[admit.row] = len(admit.token_ids) // 4
            self.computed[admit.row] = admit.num_computed_tokens
        catching_up = dict(np.frombuffer(plan.prefill, "<i4").reshape(-1, 2).tolist())
        sampled = 0
        for row in self.known:
            self.computed[row] += catching_up.get(row, 1)
            if self.computed[row] == self.known[row] and catching_up.get(row, 1):
                self.known[row] += 1
                sampled += 1
        return step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.ones(sampled, "<i4").tobytes(),
            num_rows=len(self.known),
            num_stored_tokens=sum(self.computed.values()),
        )


def measure(requests: int, mean: int, block_size: int, max_model_len: int, seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    scheduler = Scheduler(Limits(pipeline_depth=1, prefix_caching=False, max_waiting=requests))
    scheduler.reset(
        Geometry(
            num_blocks=4096 * 16 // block_size,
            block_size=block_size,
            max_num_seqs=128,
            max_model_len=max_model_len,
            max_num_batched_tokens=512,
            vocab_size=1000,
        ),
        boot_id=1,
        epoch=1,
    )
    for i in range(requests):
        prompt = np.array([draw.randrange(2, 1000) for _ in range(log_normal(draw, mean / 2, 16, mean * 4))], np.int32)
        output = log_normal(draw, mean / 2, 16, mean * 4)
        sampling = step_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)
        request = Request(session=0, request_id=str(i), handle=i, prompt=prompt, sampling=sampling, max_tokens=output)
        scheduler.submit(request, now=0.0)
    executor = Counter()
    paged, reserved, step = [], [], 0
    while (plan := scheduler.plan(now=float(step))) is not None:
        step += 1
        result = executor.run(plan)
        if owned := scheduler.stats().blocks_owned:
            paged.append(1 - result.num_stored_tokens / (owned * block_size))
            reserved.append(1 - result.num_stored_tokens / (len(executor.known) * max_model_len))
        scheduler.commit(result, now=float(step))
    scheduler.check()
    return {
        "steps": step,
        "block_size": block_size,
        "waste_paged_percent": 100 * float(np.mean(paged)),
        "waste_reserved_percent": 100 * float(np.mean(reserved)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--mean", type=int, default=500, help="prompt and output together, in tokens")
    parser.add_argument("--block-size", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(args.requests, args.mean, size, args.max_model_len, args.seed) for size in args.block_size]
    for row in rows:
        print(
            f"block size {row['block_size']:3}: {row['waste_paged_percent']:5.2f} % of allocated slots empty; "
            f"reserving max_model_len {args.max_model_len}: {row['waste_reserved_percent']:5.2f} %"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What a decision costs: microseconds of `plan` and `commit`, measured on invented results.

    python -m benchmarks.scheduler --rows 64 256 1024 --json
    python -m benchmarks.scheduler --mode admission | mixed | preemption | lookup | sketch

Steady decode: all rows decode, their block boundaries spread over the steps as they are in service. Results are made
outside the measured time, as an executor would make them. One JSON object a line. `sketch` is the least that a step
can be in numpy, and serves as a ruler: machines differ, and so does one from hour to hour, so quote ratios to it.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Request
from scheduler_svc.core.scheduler import Scheduler

BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
EOS = VOCAB_SIZE - 1


class Bench:
    """A scheduler at pipeline depth 2, answered by results that keep to its plans and never draw a stop."""

    def __init__(self, geometry: Geometry, limits: Limits | None = None):
        self.scheduler = Scheduler(limits or Limits(max_waiting=1 << 20, max_waiting_tokens=1 << 40))
        self.scheduler.reset(geometry, boot_id=1, epoch=1)
        self._rng = np.random.default_rng(1)
        self.num_submitted = 0
        self.plan_us: list[float] = []
        self.commit_us: list[float] = []
        # The same steps in CPU time of this thread: what they cost on a machine that others use too.
        self.plan_cpu_us: list[float] = []
        self.commit_cpu_us: list[float] = []
        self.plan_bytes: list[int] = []
        self._in_flight: list[step_pb2.StepPlan] = []

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        self.num_submitted += 1
        request = Request(
            session=0,
            request_id=f"r{self.num_submitted}",
            handle=self.num_submitted,
            prompt=prompt,
            sampling=step_pb2.Sampling(temperature=1.0, top_p=1.0, seed=self.num_submitted),
            max_tokens=max_tokens,
            stop_token_ids=frozenset((EOS,)),
        )
        self.scheduler.submit(request, 0.0)

    def random_prompt(self, length: int) -> np.ndarray:
        return self._rng.integers(0, EOS, length).astype(np.int32)

    def step(self) -> None:
        """One plan and, with two in flight, one commit."""
        cpu, start = time.thread_time_ns(), time.perf_counter_ns()
        plan = self.scheduler.plan(0.0)
        self.plan_us.append((time.perf_counter_ns() - start) / 1e3)
        self.plan_cpu_us.append((time.thread_time_ns() - cpu) / 1e3)
        assert plan is not None
        self.plan_bytes.append(plan.ByteSize())
        self._in_flight.append(plan)
        if len(self._in_flight) == 2:
            self.commit()

    def commit(self) -> None:
        plan = self._in_flight.pop(0)
        # What the executor would report of this step; only the number of answers and the digest matter here.
        step = self.scheduler._epoch.in_flight[0]  # type: ignore[union-attr]
        result = step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=self._rng.integers(0, EOS, len(step.roster.rows)).astype("<i4").tobytes(),
            forward_us=5000,
            num_rows=step.num_rows,
            num_stored_tokens=step.num_stored,
        )
        result = step_pb2.StepResult.FromString(result.SerializeToString())
        cpu, start = time.thread_time_ns(), time.perf_counter_ns()
        self.scheduler.commit(result, 0.0)
        self.commit_us.append((time.perf_counter_ns() - start) / 1e3)
        self.commit_cpu_us.append((time.thread_time_ns() - cpu) / 1e3)

    def forget_times(self) -> None:
        for times in (self.plan_us, self.commit_us, self.plan_cpu_us, self.commit_cpu_us):
            times.clear()
        self.plan_bytes.clear()

    def summary(self) -> dict[str, float]:
        both = [p + c for p, c in zip(self.plan_us, self.commit_us, strict=False)]
        cpu = [p + c for p, c in zip(self.plan_cpu_us, self.commit_cpu_us, strict=False)]
        return {
            # A shared machine disturbs most steps: a tenth are faster than this.
            "both_p10_us": round(float(np.percentile(both, 10)), 1),
            "plan_us": round(statistics.median(self.plan_us), 1),
            "commit_us": round(statistics.median(self.commit_us), 1),
            "both_us": round(statistics.median(both), 1),
            "both_p99_us": round(float(np.percentile(both, 99)), 1),
            "both_max_us": round(max(both), 1),
            "cpu_us": round(statistics.median(cpu), 1),
            "cpu_p99_us": round(float(np.percentile(cpu, 99)), 1),
            "plan_bytes": int(statistics.median(self.plan_bytes)),
        }


def geometry(num_rows: int, *, num_blocks: int, budget: int = 8192, max_model_len: int = 32768) -> Geometry:
    return Geometry(num_blocks, BLOCK_SIZE, num_rows, max_model_len, budget, VOCAB_SIZE)


def decode(num_rows: int, num_steps: int) -> dict[str, object]:
    """Steady decode."""
    bench = Bench(geometry(num_rows, num_blocks=num_rows * 400))
    for i in range(num_rows):
        bench.submit(bench.random_prompt(100 + i % BLOCK_SIZE), 8000)
    while bench.scheduler.stats().num_waiting or bench._in_flight[-1].prefill:
        bench.step()
    for _ in range(50):
        bench.step()
    gc.collect()
    gc.freeze()
    bench.forget_times()
    for _ in range(num_steps):
        bench.step()
    return {"mode": "decode", "rows": num_rows, **bench.summary()}


def sketch(num_rows: int, num_steps: int) -> dict[str, object]:
    """A loop that appends tokens, compares stops and grows tables, for rows that never change and checks nothing."""
    rng = np.random.default_rng(1)
    log = np.zeros((num_rows, 256), np.int32)
    table = np.zeros((num_rows, 4096), np.int32)
    lengths, stop, rows = np.arange(num_rows) % BLOCK_SIZE, np.full(num_rows, EOS, np.int32), np.arange(num_rows)
    free = list(range(1 << 20))
    times = []
    for _ in range(num_steps):
        tokens = rng.integers(0, EOS, num_rows).astype("<i4").tobytes()
        start = time.perf_counter_ns()
        drawn = np.frombuffer(tokens, "<i4")
        log[rows, lengths % 256] = drawn
        ended = (drawn == stop).nonzero()[0]
        lengths += 1
        full = (lengths % BLOCK_SIZE == 0).nonzero()[0]
        blocks = [free.pop() for _ in range(len(full))]
        table[full, lengths[full] // BLOCK_SIZE] = blocks
        times.append((time.perf_counter_ns() - start) / 1e3)
        assert not len(ended)
        free.extend(blocks)
    return {
        "mode": "sketch",
        "rows": num_rows,
        "both_us": round(statistics.median(times), 1),
        "both_p10_us": round(float(np.percentile(times, 10)), 1),
    }


def admission(prompt_tokens: int, warm: bool) -> dict[str, object]:
    """Requests a second through submit, admission, one token and the end; cold, or with the prompt cached."""
    count = 200 if prompt_tokens > 1000 else 1000
    bench = Bench(geometry(256, num_blocks=count * (prompt_tokens // BLOCK_SIZE + 2), budget=1 << 20))
    prompts = [bench.random_prompt(prompt_tokens) for _ in range(count)]
    for _ in range(2 if warm else 1):
        bench.forget_times()
        start = time.perf_counter()
        for prompt in prompts:
            bench.submit(prompt, 1)
        submit_s = time.perf_counter() - start
        while not bench.scheduler.is_idle:
            if bench.scheduler.stats().num_waiting or bench.scheduler.num_in_flight == 0:
                bench.step()
            else:
                bench.commit()
    total_s = submit_s + (sum(bench.plan_us) + sum(bench.commit_us)) / 1e6
    return {
        "mode": "admission",
        "prompt_tokens": prompt_tokens,
        "cache": "hit" if warm else "cold",
        "requests_per_s": round(count / total_s),
        "us_per_request": round(total_s / count * 1e6, 1),
    }


def lookup(prompt_tokens: int = 8192) -> dict[str, object]:
    """Finding a cached prompt: hashes of its blocks, the walk, the comparison of its tokens."""
    bench = Bench(geometry(4, num_blocks=2048, budget=1 << 20))
    prompt = bench.random_prompt(prompt_tokens + 1)
    bench.submit(prompt, 1)
    bench.step()
    bench.commit()
    bench.submit(prompt, 1)
    (sequence,) = bench.scheduler._registry.sequences.values()
    epoch = bench.scheduler._epoch
    assert epoch is not None
    times = []
    for _ in range(300):
        sequence.keys, sequence.num_hashed = b"", 0
        start = time.perf_counter()
        hits = epoch.memory.find_prefix(sequence, epoch.rows)
        times.append((time.perf_counter() - start) * 1e6)
    return {
        "mode": "lookup",
        "prompt_tokens": prompt_tokens,
        "hits": len(hits),
        "lookup_us": round(statistics.median(times), 1),
        "lookup_p99_us": round(float(np.percentile(times, 99)), 1),
    }


def mixed(num_rows: int, num_steps: int) -> dict[str, object]:
    """Decodes and chunked prefill together: requests of 500 + 100 tokens come as fast as they go."""
    bench = Bench(geometry(num_rows, num_blocks=num_rows * 50, budget=num_rows + 2048))
    for i in range(num_steps + 200):
        while bench.scheduler.stats().num_waiting < 4:
            bench.submit(bench.random_prompt(500), 100)
        if i == 200:
            gc.collect()
            gc.freeze()
            bench.forget_times()
        bench.step()
    return {"mode": "mixed", "rows": num_rows, **bench.summary()}


def preemption(num_rows: int, num_steps: int, lookahead: bool) -> dict[str, object]:
    """Pressure: the pool holds half of what the rows want, and outputs turn out far longer than those seen before.

    Without lookahead everybody is believed to end with the next token, as in schedulers that admit on what is free now.
    """
    bench = Bench(geometry(num_rows, num_blocks=num_rows * 16, budget=num_rows + 2048))
    scheduler = bench.scheduler
    scheduler._lengths.learn(64, count=2000)
    if not lookahead:
        scheduler._lengths.to_come = np.ones_like  # type: ignore[method-assign, assignment]
    lengths = np.random.default_rng(2).lognormal(5.5, 0.8, 1 << 16).clip(8, 2000).astype(int)
    used = []
    for i in range(num_steps + 200):
        while scheduler.stats().num_waiting < 4:
            bench.submit(bench.random_prompt(200), int(lengths[bench.num_submitted]))
        if i == 200:
            gc.collect()
            gc.freeze()
            bench.forget_times()
        bench.step()
        used.append(scheduler.stats().blocks_owned)
    stats = scheduler.stats()
    computed = stats.generation_tokens_total + stats.prompt_tokens_computed_total
    return {
        "mode": "preemption",
        "rows": num_rows,
        "lookahead": lookahead,
        "preemptions_per_1k_steps": round(1000 * stats.preemptions_total / len(used), 1),
        "recomputed_share": round(stats.recomputed_tokens_total / computed, 4),
        "generated_per_step": round(stats.generation_tokens_total / len(used), 1),
        "pool_used": round(float(np.mean(used[200:])) / stats.blocks_total, 3),
        **bench.summary(),
    }


def _runs(arguments: argparse.Namespace) -> Iterator[Callable[[], dict[str, object]]]:
    steps = arguments.steps
    for mode in arguments.mode:
        if mode == "admission":
            for prompt_tokens in (128, 8192):
                for warm in (False, True):
                    yield partial(admission, prompt_tokens, warm)
        elif mode == "preemption":
            for num_rows in arguments.rows:
                yield partial(preemption, num_rows, steps, lookahead=True)
                yield partial(preemption, num_rows, steps, lookahead=False)
        elif mode == "lookup":
            yield lookup
        else:
            run = {"decode": decode, "mixed": mixed, "sketch": sketch}[mode]
            for num_rows in arguments.rows:
                yield partial(run, num_rows, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the scheduler's decisions cost.")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--mode",
        nargs="+",
        default=["decode"],
        choices=["decode", "sketch", "admission", "lookup", "mixed", "preemption"],
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    arguments = parser.parse_args()
    for run in _runs(arguments):
        row = run()
        print(
            json.dumps(row) if arguments.json else "  ".join(f"{key} {value}" for key, value in row.items()), flush=True
        )


if __name__ == "__main__":
    main()

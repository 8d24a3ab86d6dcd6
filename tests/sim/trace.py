"""Golden traces: a scenario in commands, and what the scheduler planned, as plain text to be read.

A file in traces/ is a title, then commands (`> ...`), each followed by what it led to. Commands:

    > limits budget=1024 rows=8 blocks=100 block_size=16 model_len=4096 policy=FCFS target_ms=5
    > submit NAME prompt=55 [like=OTHER share=48] [max_tokens=5 n=2 stop=42 min_tokens=3 priority=0 salt=x deadline=2]
    > plan                 a step is decided and sent; prints it
    > result [42 43 ...]   the oldest step in flight returns these tokens (any, if none are given)
    > cancel NAME
    > turn NAME after=OTHER more=3   a prompt made of what OTHER asked and was told, and 3 more
    > lost                 the executor goes
    > start                another one comes
    > later 1.5            seconds pass
    > times base_us=1000 token_us=100   it is known how long a step takes
    > pool                 prints how many blocks are owned, cached, free
    > counts               prints how many prompt tokens were computed and how many were hit, of admitted requests
"""

import sys
from collections import defaultdict, deque
from pathlib import Path

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Output, Policy, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import RequestError

TRACES = Path(__file__).parent / "traces"
ANY_TOKEN = 7


class Player:
    def __init__(self) -> None:
        self.scheduler = Scheduler(Limits())
        self.geometry = Geometry(100, 16, 8, 4096, 1024, 1000)
        self.epoch = 0
        self.now = 0.0
        self.step_us = (1000, 0)
        self.names: dict[int, str] = {}
        self.requests: dict[str, Request] = {}
        self.told: defaultdict[str, list[int]] = defaultdict(list)
        self.in_flight: deque[step_pb2.StepPlan] = deque()

    def play(self, text: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("> "):
                lines.append(line)
                verb, *words = line[2:].split()
                lines += [f"    {answer}" for answer in getattr(self, verb)(*words)]
                self.scheduler.check()
            elif not line.startswith("    "):
                lines.append(line)
        return "\n".join(lines) + "\n"

    # ---- commands ----------------------------------------------------------------------------------------------

    def limits(self, *words: str) -> list[str]:
        o = {"budget": "1024", "rows": "8", "blocks": "100", "block_size": "16", "model_len": "4096", "policy": "FCFS"}
        o |= dict(word.split("=") for word in words)
        self.scheduler = Scheduler(
            Limits(
                policy=Policy[o["policy"]],
                watermark=0.0,
                prefix_caching=o.get("caching") != "off",
                inter_token_target_s=float(o["target_ms"]) / 1000 if "target_ms" in o else None,
            )
        )
        if "hope" in o:  # every sequence is believed to end with its next token: growth will want for blocks
            self.scheduler._lengths.to_come = np.ones_like  # type: ignore[method-assign]
        sizes = (int(o[name]) for name in ("blocks", "block_size", "rows", "model_len", "budget"))
        self.geometry = Geometry(*sizes, vocab_size=1000)
        return self.start()

    def submit(self, name: str, *words: str) -> list[str]:
        o = dict(word.split("=") for word in words)
        prompt = self._tokens(name, int(o.get("prompt", 1)))
        if "like" in o:
            other = self.requests[o["like"]].prompt
            prompt[: int(o["share"])] = np.resize(other, int(o["share"]))
        handle = 10 * (len(self.requests) + 1)
        num_choices = int(o.get("n", 1))
        for i in range(num_choices):
            self.names[handle + i] = name if num_choices == 1 else f"{name}.{i}"
        request = Request(
            session=0,
            request_id=name,
            handle=handle,
            prompt=prompt,
            sampling=step_pb2.Sampling(),
            max_tokens=int(o.get("max_tokens", 100)),
            num_choices=num_choices,
            min_tokens=int(o.get("min_tokens", 0)),
            stop_token_ids=frozenset(int(t) for t in o["stop"].split(",")) if "stop" in o else frozenset(),
            priority=int(o.get("priority", 0)),
            tenant=o.get("tenant", ""),
            cache_salt=o.get("salt", "").encode(),
            deadline=float(o["deadline"]) if "deadline" in o else None,
        )
        try:
            self.scheduler.submit(request, self.now)
        except RequestError as error:
            return [f"refused: {error.message}"]
        self.requests[name] = request
        return []

    def plan(self) -> list[str]:
        plan = self.scheduler.plan(self.now)
        said = self._say(self.scheduler.take_output())
        if plan is None:
            return ["nothing to do", *said]
        self.in_flight.append(plan)
        return [*self._describe(plan), *said]

    def result(self, *tokens: str) -> list[str]:
        step = self.scheduler._epoch.in_flight[0]  # type: ignore[union-attr]
        plan = self.in_flight.popleft()
        count = len(step.roster.rows)
        drawn = [int(token) for token in tokens] + [ANY_TOKEN] * (count - len(tokens))
        assert len(drawn) == count, f"{count} rows answer, not {len(drawn)}"
        result = step_pb2.StepResult(
            boot_id=plan.boot_id,
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=np.array(drawn, "<i4").tobytes(),
            num_rows=step.num_rows,
            num_stored_tokens=step.num_stored,
            forward_us=self._step_us(step.num_tokens),
        )
        return self._say(self.scheduler.commit(result, self.now))

    def turn(self, name: str, *words: str) -> list[str]:
        o = dict(word.split("=") for word in words)
        told = np.array(self.told[o["after"]], np.int32)
        whole = np.concatenate([self.requests[o["after"]].prompt, told])
        prompt = f"prompt={len(whole) + int(o['more'])}"
        self.requests["whole"] = Request(0, "whole", 0, whole, step_pb2.Sampling(), 0)
        return self.submit(name, prompt, "like=whole", f"share={len(whole)}")

    def cancel(self, name: str) -> list[str]:
        return [] if self.scheduler.cancel_request(name) else ["unknown, and no error"]

    def later(self, seconds: str) -> list[str]:
        self.now += float(seconds)
        return []

    def times(self, *words: str) -> list[str]:
        o = {name: int(number) for name, number in (word.split("=") for word in words)}
        self.step_us = o["base_us"], o["token_us"]
        for num_tokens in range(1, 100):
            self.scheduler._planner.step_time.learn(num_tokens, 0, self._step_us(num_tokens))
        return []

    def lost(self) -> list[str]:
        self.in_flight.clear()
        self.scheduler.executor_lost()
        return []

    def start(self) -> list[str]:
        self.epoch += 1
        self.in_flight.clear()
        self.scheduler.reset(self.geometry, 1, self.epoch)
        return []

    def pool(self) -> list[str]:
        stats = self.scheduler.stats()
        return [f"{stats.blocks_owned} owned, {stats.blocks_cached} cached, {stats.blocks_free} free"]

    def counts(self) -> list[str]:
        stats = self.scheduler.stats()
        return [f"{stats.prompt_tokens_computed_total} computed, {stats.prompt_tokens_cached_total} hit"]

    # ---- words -------------------------------------------------------------------------------------------------

    def _step_us(self, num_tokens: int) -> int:
        return self.step_us[0] + self.step_us[1] * num_tokens

    def _tokens(self, name: str, count: int) -> np.ndarray:
        return np.random.default_rng(sum(name.encode())).integers(100, 1000, count).astype(np.int32)

    def _describe(self, plan: step_pb2.StepPlan) -> list[str]:
        epoch = self.scheduler._epoch
        assert epoch is not None
        who = {s.row: self.names[s.handle] for s in epoch.rows.sequence if s is not None}
        lines = [f"step {plan.step_id}"]
        released = np.frombuffer(plan.release, "<i4").tolist()
        if released:
            lines.append(f"release rows {' '.join(map(str, released))}")
        for admit in plan.admit:
            known, blocks = len(admit.token_ids) // 4, np.frombuffer(admit.block_ids, "<i4").tolist()
            lines.append(
                f"admit {who[admit.row]} to row {admit.row}: {known} tokens, {admit.num_computed_tokens} computed, "
                f"blocks {' '.join(map(str, blocks))}"
            )
        lines += [f"copy block {a} to {b}" for a, b in np.frombuffer(plan.copy, "<i4").reshape(-1, 2).tolist()]
        lines += [f"grow {who[r]} by block {b}" for r, b in np.frombuffer(plan.grow, "<i4").reshape(-1, 2).tolist()]
        chunks = dict(np.frombuffer(plan.prefill, "<i4").reshape(-1, 2).tolist())
        computed = [f"{who[row]} {chunks.get(row, 1)}" for row in sorted(who)]
        lines.append(f"compute {', '.join(computed) or 'nothing'}")
        return lines

    def _say(self, output: Output) -> list[str]:
        lines = [
            f"{self.names[int(handle)]} [{position}] = {token}"
            for handle, token, position in zip(output.handle, output.token, output.position, strict=True)
        ]
        for handle, token in zip(output.handle, output.token, strict=True):
            self.told[self.names[int(handle)]].append(int(token))
        for end in output.finished:
            stop = f" by {end.stop_token_id}" if end.stop_token_id is not None else ""
            lines.append(f"{self.names[end.handle]} ends: {end.cause.name}{stop}, {end.num_output_tokens} tokens")
        return lines


def play(path: Path) -> str:
    return Player().play(path.read_text())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(play(Path(name)))

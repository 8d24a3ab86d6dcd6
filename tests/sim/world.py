"""A world in a seed: the real core, HashExec, a virtual clock, and everything that can go wrong.

One seed chooses the pool (often tiny), the pipeline depth, the policy, the traffic and the faults. After every event
the core's laws are checked; at the end every stream must equal the unbatched oracle, and everything must be empty. What
rarely happens is counted in `seen`, so that the suite can insist that it did happen.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import rows
from scheduler_svc.core.contract import Cause, Delivered, Geometry, Limits, Output, Policy, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import State
from scheduler_svc.errors import AlreadyExists, InvalidArgument, ProtocolViolation, QueueFull
from tests.sim.hash_exec import Died, HashExec, oracle, score
from tests.sim.witness import note_plan

MAX_MODEL_LEN = 64
VOCAB_SIZE = 40


@dataclass(slots=True)
class Client:
    """What a frontend knows of one choice."""

    request: Request
    choice: int
    received: list[int] = field(default_factory=list)
    cause: Cause | None = None
    is_gone: bool = False  # its session was dropped, or it had ended before a resume
    num_preemptions: int = 0
    num_resumes: int = 0


class World:
    def __init__(self, seed: int):
        self.seed = seed
        self.random = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.boot_id = 1
        self.epoch = 0
        self.num_requests = 0
        self.requests: dict[str, Request] = {}
        self.clients: dict[tuple[int, int], Client] = {}
        # By request: the logprobs of its prompt, as they came.
        self.scores: dict[str, list[float]] = {}
        self.depth = self.random.choice([1, 2, 2, 3, 4])
        # In some worlds many come at once, all have a seat, and steps must be short.
        self.is_crowded = self.random.random() < 0.05
        self.limits = Limits(
            max_waiting=self.random.choice([4, 1000]),
            max_waiting_tokens=self.random.choice([60, 10_000]),
            max_waiting_per_tenant=None if self.is_crowded else self.random.choice([None, None, None, None, 2]),
            max_waiting_tokens_per_tenant=None if self.is_crowded else self.random.choice([None, None, None, None, 40]),
            max_wait_s=self.random.choice([None, None, 2.0]),
            policy=self.random.choice(list(Policy)),
            pipeline_depth=self.depth,
            prefix_caching=self.random.random() < 0.8,
            watermark=self.random.choice([0.0, 0.01, 0.2]),
            max_preemptions=self.random.choice([0, 1, 3]),
            max_executor_deaths=self.random.choice([3, 4]),
            inter_token_target_s=0.0011 if self.is_crowded else self.random.choice([None, None, 0.0011]),
        )
        self.chance = {
            name: self.random.choice(choices)
            for name, choices in {
                "submit": [0.1, 0.3, 0.6],
                "burst": [0.1] if self.is_crowded else [0, 0, 0.05],
                "cancel": [0, 0.02, 0.1],
                "lose": [0, 0, 0.01, 0.05],
                "restart": [0, 0, 0, 0.01],
                "drop": [0, 0, 0.01],
                "bad result": [0, 0.05],
                "deadline": [0, 0, 0.3],
                "poison": [0, 0, 0, 0.1],
            }.items()
        }
        self.prefixes = [self._tokens(self.random.randint(1, 30)) for _ in range(3)]
        self.geometry = self._geometry()
        # Some schedulers believe that every sequence is about to end, and will have to preempt.
        self.is_hopeful = self.random.random() < 0.6
        self.scheduler = self._scheduler()
        self.executor: HashExec | None = None
        # Whose tokens each block holds.
        self.domains: dict[int, tuple[str, bytes]] = {}
        self.in_flight: deque[step_pb2.StepResult] = deque()
        self.trace: list[bytes] = []
        # Seeds of requests that kill whatever executor computes their token at a position.
        self.poison: dict[int, int] = {}
        self.num_poison_deaths = 0
        self.num_lives = 1

    # ---- a life ------------------------------------------------------------------------------------------------

    def run(self) -> "World":
        for _ in range(self.random.choice([60, 150])):
            self._happen()
            self.check()
        self.chance = dict.fromkeys(self.chance, 0)
        patience = 4 * MAX_MODEL_LEN * (1 + len(self.clients))
        while not self.scheduler.is_idle:
            self._step()
            self.check()
            patience -= 1
            assert patience, f"no progress: {self.scheduler.stats()}"
        self._check_streams()
        return self

    def check(self) -> None:
        self.scheduler.check()

    def _happen(self) -> None:
        self.now += self.random.choice([0.0, 0.01, 0.5])
        if self._by_chance("submit"):
            for _ in range(8 if self._by_chance("burst") else 1):
                self._submit()
        if self._by_chance("cancel"):
            self._cancel()
        if self._by_chance("drop"):
            self._drop_session()
        if self._by_chance("lose"):
            self._lose_executor()
        if self._by_chance("restart"):
            self._restart_scheduler()
        self._step()

    def _by_chance(self, name: str) -> bool:
        return self.random.random() < self.chance[name]

    # ---- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Plans, commits, or both; an executor comes when there is none."""
        if self.executor is None:
            if self.random.random() < 0.7:
                self._start_executor()
            elif self.scheduler._epoch is None:
                assert self.scheduler.plan(self.now) is None
                self._deliver(self.scheduler.take_output())
            return
        planned = False
        if len(self.in_flight) < self.depth:
            planned = self._plan(self.executor)
        if self.in_flight and (len(self.in_flight) == self.depth or not planned or self.random.random() < 0.3):
            self._commit()

    def _plan(self, executor: HashExec) -> bool:
        epoch = self.scheduler._epoch
        assert epoch is not None
        num_preemptions = epoch.num_preemptions
        plan = self.scheduler.plan(self.now)
        note_plan(self, plan, num_preemptions)
        if plan is None:
            self._deliver(self.scheduler.take_output())
            return False
        data = plan.SerializeToString(deterministic=True)
        self.trace.append(data)
        try:
            self.in_flight.append(executor.run(step_pb2.StepPlan.FromString(data)))
        except Died:
            self.num_poison_deaths += 1
            allowed = (self.limits.max_executor_deaths + 1) * len(self.poison) * self.num_lives
            assert self.num_poison_deaths <= allowed, f"{self.num_poison_deaths} deaths by {len(self.poison)} requests"
            self._lose_executor()
        return True

    def _commit(self) -> None:
        result = self.in_flight.popleft()
        if self._by_chance("bad result"):
            self._try_bad_results(result)
        output = self.scheduler.commit(result, self.now)
        self._deliver(output)

    def _try_bad_results(self, good: step_pb2.StepResult) -> None:
        """Late, duplicated, forged and garbled results are refused and change nothing."""
        before = self.scheduler.stats(), self.scheduler.num_in_flight
        for name, spoil in {
            "late": lambda bad: setattr(bad, "step_id", bad.step_id - 1),
            "early": lambda bad: setattr(bad, "step_id", bad.step_id + 1),
            "old epoch": lambda bad: setattr(bad, "epoch", bad.epoch - 1),
            "foreign": lambda bad: setattr(bad, "boot_id", bad.boot_id + 1),
            "rows differ": lambda bad: setattr(bad, "num_rows", bad.num_rows + 1),
            "tokens differ": lambda bad: setattr(bad, "num_stored_tokens", bad.num_stored_tokens + 1),
            "one too many": lambda bad: setattr(bad, "token_ids", bad.token_ids + b"\0\0\0\0"),
            "no such token": lambda bad: setattr(bad, "token_ids", b"\xff" * len(bad.token_ids)),
        }.items():
            bad = step_pb2.StepResult()
            bad.CopyFrom(good)
            spoil(bad)
            if bad == good:
                continue
            try:
                self.scheduler.commit(bad, self.now)
            except ProtocolViolation:
                self.seen[f"refused: {name}"] += 1
            else:
                raise AssertionError(f"a result was taken that is {name}")
        assert before == (self.scheduler.stats(), self.scheduler.num_in_flight)

    def _start_executor(self) -> None:
        self.epoch += 1
        if self.random.random() < 0.3:
            self.geometry = self._geometry()
            self.seen["capacity changed"] += self.epoch > 1
        # How long drawn tokens stay outside their logs; the usual 256 steps are longer than most streams here.
        rows.HISTORY = self.random.choice([1, 5, 256])
        self.scheduler.reset(self.geometry, self.boot_id, self.epoch)
        self.executor = HashExec(self.geometry, self.boot_id, self.epoch)
        self.executor.poison = self.poison
        self.domains.clear()
        self._deliver(self.scheduler.take_output())

    def _lose_executor(self) -> None:
        if self.executor is None:
            return
        self.seen["executor lost"] += 1
        self.seen["executor lost with steps in flight"] += bool(self.in_flight)
        epoch = self.scheduler._epoch
        assert epoch is not None
        self.seen["executor lost with a sequence finishing"] += bool(epoch.finishing)
        self.seen["executor lost in the middle of a prompt"] += bool(epoch.catching_up)
        self.executor = None
        self.in_flight.clear()
        if self.random.random() < 0.5:
            self.scheduler.executor_lost()
            self._deliver(self.scheduler.take_output())

    def _restart_scheduler(self) -> None:
        """The scheduler's process dies; each frontend resubmits what is live, from the tokens it has."""
        self.seen["scheduler restarted"] += 1
        self.num_lives += 1
        self.scheduler = self._scheduler()
        self.executor = None
        self.in_flight.clear()
        self.boot_id += 1
        self.epoch = 0
        for request in list(self.requests.values()):
            clients = [self.clients[request.session, request.handle + i] for i in range(request.num_choices)]
            if all(client.cause is not None or client.is_gone for client in clients):
                continue
            request.delivered = tuple(
                Delivered(
                    np.array(client.received, np.int32),
                    client.cause is not None or client.is_gone,
                    client.num_preemptions,
                    client.num_resumes,
                )
                for client in clients
            )
            request.num_prompt_logprobs = len(self.scores[request.request_id])
            self.seen["resumed with some choices ended"] += any(d.finished for d in request.delivered)
            self.scheduler.submit(request, self.now)
        self._deliver(self.scheduler.take_output())

    def _scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.limits)
        if self.is_hopeful:
            scheduler._lengths.to_come = np.ones_like  # type: ignore[method-assign]
        return scheduler

    # ---- traffic -----------------------------------------------------------------------------------------------

    def _geometry(self) -> Geometry:
        if self.is_crowded:
            return Geometry(60, 8, 8, MAX_MODEL_LEN, 64, VOCAB_SIZE)
        return Geometry(
            num_blocks=self.random.choice([5, 8, 12, 24, 60]),
            block_size=self.random.choice([1, 2, 3, 4, 8, 16]),
            max_num_seqs=self.random.choice([1, 2, 4, 8]),
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=self.random.choice([1, 4, 7, 16, 64, 256]),
            vocab_size=VOCAB_SIZE,
        )

    def _tokens(self, count: int) -> np.ndarray:
        return np.array([self.random.randrange(VOCAB_SIZE) for _ in range(count)], np.int32)

    def _prompt(self) -> np.ndarray:
        kind = self.random.random()
        tokens = self._tokens(self.random.randint(1, 12))
        if kind < 0.2:
            return self.random.choice(self.prefixes)
        if kind < 0.6:
            return np.concatenate([self.random.choice(self.prefixes), tokens])
        if kind < 0.7 and self.clients:
            # A conversation goes on: what somebody was told comes back as a prompt.
            talking = [c for c in self.clients.values() if c.cause is None and not c.is_gone and c.received]
            among = talking if talking and self.random.random() < 0.5 else list(self.clients.values())
            client = self.random.choice(among)
            known = np.concatenate([client.request.prompt, np.array(client.received, np.int32), tokens])
            return known[: MAX_MODEL_LEN - 5].astype(np.int32)
        return tokens

    def _submit(self) -> None:
        self.num_requests += 1
        rng = self.random
        sampling = step_pb2.Sampling(temperature=1.0, seed=rng.randrange(1000))
        if rng.random() < 0.2:
            sampling.logprobs = 0
        if self.num_requests % 4 == 0:
            sampling.prompt_logprobs = 0
        if self._by_chance("poison"):
            sampling.seed = 1_000_000 + self.num_requests
            self.poison[sampling.seed] = rng.choice([0, 1, 5, 20])
        request = Request(
            session=rng.randrange(3),
            request_id=f"r{self.num_requests}",
            handle=self.num_requests * 100,
            prompt=self._prompt(),
            sampling=sampling,
            max_tokens=rng.choice([0, 1, 2, 5, 10, 25, 50]),
            num_choices=rng.choice([1, 1, 1, 2, 3]),
            min_tokens=rng.choice([0, 0, 4]),
            stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1, 3]))),
            priority=rng.choice([0, 0, -5, 5]),
            tenant=rng.choice(["", "a", "b"]),
            cache_salt=rng.choice([b"", b"", b"x"]),
            deadline=self.now + rng.random() * 10 if self._by_chance("deadline") else None,
        )
        try:
            self.scheduler.submit(request, self.now)
        except InvalidArgument:
            self.seen["refused: it could never fit"] += 1
            return
        except QueueFull as error:
            name = "refused: tenant" if "tenant" in error.message else "refused: queue full"
            self.seen[name] += (error.retry_after_s or 0) >= 0.1
            return
        self.requests[request.request_id] = request
        self.scores[request.request_id] = []
        for choice in range(request.num_choices):
            self.clients[request.session, request.handle + choice] = Client(request, choice)
        try:
            self.scheduler.submit(request, self.now)
        except AlreadyExists:
            pass
        else:
            raise AssertionError("one request_id, two live requests")
        self._deliver(self.scheduler.take_output())

    def _cancel(self) -> None:
        if not self.clients:
            return
        key, client = self.random.choice(list(self.clients.items()))
        epoch = self.scheduler._epoch
        leaders = [s for s in epoch.catching_up if s.followers] if epoch is not None else []
        if leaders and self.random.random() < 0.5:
            key = (leaders[0].request.session, leaders[0].handle)
            client = self.clients[key]
        sequence = self.scheduler._registry.sequences.get(key)
        if sequence is not None:
            self.seen[f"cancelled while {sequence.state.value}"] += 1
            if sequence.state is State.WAITING and sequence.ticket is None:
                self.seen["cancelled while parked"] += 1
            if sequence.followers:
                self.seen["cancelled with followers"] += 1
        if self.random.random() < 0.5:
            found = self.scheduler.cancel_handle(*key)
        else:
            found = self.scheduler.cancel_request(client.request.request_id)
        assert found or client.cause is not None or client.is_gone
        self._deliver(self.scheduler.take_output())

    def _drop_session(self) -> None:
        session = self.random.randrange(3)
        # What has been told already is on its way.
        self._deliver(self.scheduler.take_output())
        live = [c for (s, _), c in self.clients.items() if s == session and c.cause is None and not c.is_gone]
        assert self.scheduler.drop_session(session) == len(live)
        for client in live:
            client.is_gone = True
        self.seen["session dropped"] += bool(live)

    # ---- what comes back ---------------------------------------------------------------------------------------

    def _deliver(self, output: Output) -> None:
        for i in range(len(output.token)):
            client = self.clients[int(output.session[i]), int(output.handle[i])]
            assert client.cause is None, "a token after the end"
            assert not client.is_gone, "a token for a session that is gone"
            assert output.position[i] == len(client.received), "a token is lost or repeated"
            client.received.append(int(output.token[i]))
        asked = {
            i
            for i in range(len(output.token))
            if self.clients[int(output.session[i]), int(output.handle[i])].request.sampling.HasField("logprobs")
        }
        assert {entry for entry, _ in output.logprobs} == asked
        for entry, values in output.logprobs:
            assert values.logprob == -float(output.token[entry])
        for session, handle, values in output.prompt_logprobs:
            request = self.clients[session, handle].request
            known = self.scores[request.request_id]
            assert values.first_position == len(known) + 1, "prompt logprobs are lost or repeated"
            known += np.frombuffer(values.logprobs, "<f4").tolist()
        for finished in output.finished:
            client = self.clients[finished.session, finished.handle]
            assert client.cause is None, "it ended twice"
            assert not client.is_gone
            assert finished.num_output_tokens == len(client.received)
            client.cause = finished.cause
            if "executors died" in finished.message:
                is_guilty = client.request.sampling.seed in self.poison
                self.seen["convicted: guilty" if is_guilty else "convicted: hit too often"] += 1
                assert is_guilty or self.seen["executor lost"] > self.num_poison_deaths, "an innocent is convicted"
            client.num_preemptions, client.num_resumes = finished.num_preemptions, finished.num_resumes
            self.seen[f"finished {finished.cause.name}"] += 1
            self.seen["preempted and yet right"] += finished.num_preemptions > 0
            self.seen["preempted as often as may be"] += finished.num_preemptions == self.limits.max_preemptions > 0
            self.seen["resumed and yet right"] += finished.num_resumes > 0
            assert finished.num_preemptions <= self.limits.max_preemptions, "preempted without bound"

    def _check_streams(self) -> None:
        for client in self.clients.values():
            if not client.is_gone:
                assert client.cause is not None, f"{client.request.request_id} never ended"
            self._check_scores(client)
            # Capacity may change, the context length does not.
            want, cause = oracle(client.request, client.choice, self.geometry)
            story = self.scheduler.story(client.request.request_id)
            if client.cause in (Cause.STOP, Cause.LENGTH):
                assert (client.received, client.cause.name) == (want, cause), story
            else:
                assert client.received == want[: len(client.received)], story

    def _check_scores(self, client: Client) -> None:
        """Complete before the end, whatever became of the request; and right."""
        request = client.request
        got, prompt = self.scores[request.request_id], request.prompt
        want = [score(prompt[:p], int(prompt[p])) for p in range(1, len(prompt))]
        if not request.sampling.HasField("prompt_logprobs"):
            assert not got
        elif client.cause in (Cause.STOP, Cause.LENGTH):
            assert got == want
            self.seen["a prompt scored and preempted"] += client.num_preemptions > 0
            self.seen["a prompt scored and resumed"] += client.num_resumes > 0
        else:
            assert got == want[: len(got)]

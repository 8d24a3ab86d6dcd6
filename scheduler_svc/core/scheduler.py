"""The scheduler: the face of the core. Facts in, plans and outputs out.

Knows no clock, no socket, no text and no policy: time is an argument, and each decision has a file of its own. A call
either does what it says or raises a RequestError or ProtocolViolation and has changed nothing.
"""

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core import intake
from scheduler_svc.core.admission import LengthHistogram
from scheduler_svc.core.block_events import BlockEvents
from scheduler_svc.core.committer import StopFilter, commit
from scheduler_svc.core.contract import Cause, Geometry, Limits, Output, Request, Stats
from scheduler_svc.core.door import Door
from scheduler_svc.core.epoch import Epoch
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policy import WaitingQueue
from scheduler_svc.core.prefix_index import root
from scheduler_svc.core.quarantine import Quarantine
from scheduler_svc.core.registry import Registry
from scheduler_svc.core.sequence import RequestState, Sequence, State
from scheduler_svc.core.story import Moment, sentences
from scheduler_svc.core.survey import Survey, survey
from scheduler_svc.errors import AlreadyExists, InvalidArgument, ProtocolViolation


class Scheduler:
    def __init__(self, limits: Limits):
        self._limits = limits
        self._door = Door(limits)
        self._registry = Registry(self._door)
        self._queue = WaitingQueue(limits.policy)
        self._quarantine = Quarantine(limits.max_executor_deaths)
        self._lengths = LengthHistogram()
        self._planner = Planner(limits, self._queue, self._quarantine, self._registry, self._lengths)
        # The last one known; it outlives its epoch so that requests can be judged while no executor is here.
        self._geometry: Geometry | None = None
        # None: no executor.
        self._epoch: Epoch | None = None
        # Made for the vocabulary of the epoch; None: no epoch yet.
        self._stops: StopFilter | None = None
        self._listens_to_blocks = False
        # Preemptions of epochs that are over.
        self._num_past_preemptions = 0
        # Of the epoch that ended last.
        self._past = Moment(0, 0)

    # ---- requests ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        registry = self._registry
        intake.check_request(request)
        if self._geometry is not None:
            intake.check_fits(request, self._geometry)
        if request.request_id in registry.requests:
            raise AlreadyExists(f"request {request.request_id} is live", field="request_id")
        if any((request.session, request.handle + i) in registry.sequences for i in range(request.num_choices)):
            raise AlreadyExists(f"handle {request.handle} is live", field="handle")
        # What runs already after the loss of a scheduler is not new load.
        if request.delivered is None:
            self._door.check(request, now)
        state = registry.add(
            request, root(self._limits.hash_key, request.tenant, request.cache_salt), now, self._planned
        )
        if state.sequences:
            self._queue.arrive(request.tenant, len(state.sequences))
        if self._stops is not None:
            self._stops.add(request.stop_token_ids, len(state.sequences))
        for sequence in list(state.sequences):
            sequence.num_charged = sequence.num_output
            self._queue.push(sequence)
            self._finish_if_over(sequence)

    def cancel_request(self, request_id: str) -> bool:
        state = self._registry.requests.get(request_id)
        if state is None:
            return False
        self._finish_all(list(state.sequences), Cause.CANCELLED)
        return True

    def cancel_handle(self, session: int, handle: int) -> bool:
        sequence = self._registry.sequences.get((session, handle))
        if sequence is None:
            return False
        self._finish(sequence, Cause.CANCELLED)
        return True

    def drop_session(self, session: int) -> int:
        dropped = [sequence for sequence in self._registry.sequences.values() if sequence.request.session == session]
        for sequence in dropped:
            self._finish(sequence, Cause.CANCELLED, told=False)
        self._registry.forget_session(session)
        return len(dropped)

    # ---- steps -------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> int:
        """Ends the sequences that have outlived their deadline; returns how many. `plan` does it too."""
        late = self._registry.expired(now)
        self._finish_all(late, Cause.EXPIRED)
        return len(late)

    def plan(self, now: float) -> step_pb2.StepPlan | None:
        self.expire(now)
        if self._epoch is None:
            return None
        return self._planner.plan(self._epoch, now)

    def commit(self, result: step_pb2.StepResult, now: float) -> Output:
        epoch = self._epoch
        if epoch is None or self._stops is None:
            raise ProtocolViolation("a result, and no epoch")
        committed = commit(epoch, result, self._stops)
        if self._limits.inter_token_target_s is not None:
            step = committed.step
            self._planner.step_time.learn(step.num_tokens, step.num_stored, result.forward_us)
        self._registry.generation_tokens += len(committed.output.token)
        at = Moment(epoch.number, committed.step.step_id)
        for sequence, why in committed.faulted:
            self._finish(sequence, Cause.INVALID, message=why, at=at)
        for sequence, token in committed.stopped:
            self._finish(sequence, Cause.STOP, stop_token_id=token, at=at)
        for sequence in committed.step.final:
            if sequence.state is not State.FINISHED:
                self._finish(sequence, Cause.LENGTH, at=at)
        if self._quarantine.is_active:
            self._quarantine.clear(epoch)
        return self._registry.take_events(committed.output)

    def take_output(self) -> Output:
        return self._registry.take_events(Output())

    @property
    def _planned(self) -> Moment:
        """The last step that was planned; between epochs, the one that would have been next."""
        epoch = self._epoch
        return Moment(epoch.number, epoch.next_step_id - 1) if epoch is not None else self._past

    @property
    def num_in_flight(self) -> int:
        return len(self._epoch.in_flight) if self._epoch is not None else 0

    @property
    def is_idle(self) -> bool:
        """No request lives, no step is in flight and no release is owed."""
        epoch = self._epoch
        return not self._registry.requests and (epoch is None or not (epoch.in_flight or epoch.releases))

    # ---- epochs ------------------------------------------------------------------------------------------------

    def executor_lost(self) -> None:
        if self._epoch is None:
            return
        convicted = self._quarantine.accuse(self._epoch)
        self._epoch.lose()
        self._past = self._epoch.planning
        self._num_past_preemptions += self._epoch.num_preemptions
        self._epoch = None
        self._stops = None
        for sequence in self._registry.sequences.values():
            sequence.fence = 0
            # The next executor's blocks may be of another size.
            sequence.keys, sequence.num_hashed = b"", 0
        if convicted is not None:
            message = f"executors died {convicted.num_deaths} times while they computed this request"
            for sequence in list(convicted.sequences):
                self._finish(sequence, Cause.FAILED, message=message)

    def reset(self, geometry: Geometry, boot_id: int, epoch: int) -> None:
        self.executor_lost()
        self._geometry = geometry
        self._epoch = Epoch(geometry, boot_id, epoch, self._limits, self._queue)
        self._epoch.memory.listen(self._listens_to_blocks)
        for state in list(self._registry.requests.values()):
            self._judge_again(state, geometry)
        self._stops = StopFilter(geometry.vocab_size)
        for state in self._registry.requests.values():
            self._stops.add(state.request.stop_token_ids, len(state.sequences))

    def _judge_again(self, state: RequestState, geometry: Geometry) -> None:
        """A request that waits, before an executor that may be another one than it was accepted for."""
        try:
            intake.check_fits(state.request, geometry)
        except InvalidArgument as error:
            for sequence in list(state.sequences):
                self._finish(sequence, Cause.FAILED, message=error.message)
        for sequence in list(state.sequences):
            self._finish_if_over(sequence)

    # ---- block events ------------------------------------------------------------------------------------------

    def listen_to_blocks(self, is_on: bool) -> None:
        """Off, which is how it begins, nothing is recorded. An epoch's end takes its blocks with it, unsaid."""
        if is_on != self._listens_to_blocks:
            self._listens_to_blocks = is_on
            if self._epoch is not None:
                self._epoch.memory.listen(is_on)

    @property
    def block_events(self) -> BlockEvents | None:
        """Of this epoch, while somebody listens; another object is another epoch's."""
        return self._epoch.memory.events if self._epoch is not None else None

    def prefix_root(self, tenant: str) -> np.uint64:
        """What the block events of this tenant's prefixes without a salt have as their root."""
        return root(self._limits.hash_key, tenant, b"")[0]

    # ---- the end of a sequence ---------------------------------------------------------------------------------

    def _finish_if_over(self, sequence: Sequence) -> None:
        """A resumed sequence may have delivered its last token already, and only the word of its end was lost."""
        if not sequence.num_output:
            return
        token = int.from_bytes(sequence.log[-4:], "little")
        limit = sequence.num_prompt + sequence.request.max_tokens
        if self._geometry is not None:
            limit = sequence.limit(self._geometry)
        if sequence.is_stop(token, sequence.num_output):
            self._finish(sequence, Cause.STOP, stop_token_id=token)
        elif sequence.num_logged >= limit:
            self._finish(sequence, Cause.LENGTH)

    def _finish_all(self, sequences: list[Sequence], cause: Cause) -> None:
        for sequence in sequences:
            self._finish(sequence, cause)

    def _finish(
        self,
        sequence: Sequence,
        cause: Cause,
        *,
        stop_token_id: int | None = None,
        message: str = "",
        told: bool = True,
        at: Moment | None = None,
    ) -> None:
        """The one way out, from whatever state. `at`: the step that ended it; else it is the last one planned."""
        if self._epoch is not None:
            self._epoch.retire(sequence)
        sequence.state = State.FINISHED
        self._queue.depart(sequence)
        if self._stops is not None:
            self._stops.add(sequence.request.stop_token_ids, -1)
        if cause in (Cause.STOP, Cause.LENGTH):
            self._lengths.learn(sequence.num_output)
        self._registry.remove(sequence, cause, stop_token_id, message, told=told, at=at or self._planned)

    # ---- what there is to see ----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        registry, epoch = self._registry, self._epoch
        num_running = epoch.rows.num_live + len(epoch.finishing) if epoch is not None else 0
        pool = epoch.memory.pool if epoch is not None else None
        return Stats(
            num_running=num_running,
            num_waiting=len(registry.sequences) - num_running,
            blocks_total=pool.num_blocks if pool else 0,
            blocks_owned=pool.num_owned if pool else 0,
            blocks_cached=pool.num_cached if pool else 0,
            blocks_free=pool.num_free if pool else 0,
            generation_tokens_total=registry.generation_tokens,
            prompt_tokens_total=registry.prompt_tokens,
            prompt_tokens_cached_total=registry.prompt_tokens_cached,
            prompt_tokens_computed_total=registry.prompt_tokens - registry.prompt_tokens_cached,
            preemptions_total=self._num_past_preemptions + (epoch.num_preemptions if epoch is not None else 0),
            recomputed_tokens_total=registry.recomputed_tokens,
        )

    def story(self, request_id: str) -> list[str]:
        """The last transitions of a request's sequences, oldest first."""
        return sentences(self._registry.story(request_id))

    def transitions(self, request_id: str) -> list[tuple[int, int, str, tuple[int, ...]]]:
        """The same as values: (step_id, choice, what happened, numbers)."""
        return [(at.step_id, choice, event, numbers) for at, choice, event, numbers in self._registry.story(request_id)]

    def seated(self, row: int) -> tuple[str, int]:
        """Whose row it is: the request's id and the choice. Raises AssertionError for a row that is free."""
        assert self._epoch is not None
        sequence = self._epoch.rows.seated(row)
        return sequence.request.request_id, sequence.choice

    def survey(self, now: float) -> Survey:
        """Everything there is to see, for somebody who watches."""
        return survey(self._registry, self._epoch, now)

    def check(self) -> None:
        """Asserts every law of the core."""
        self._registry.check()
        self._queue.check()
        if self._epoch is not None:
            self._epoch.check()
        if self.is_idle and self._epoch is not None:
            stats = self.stats()
            assert stats.num_running == stats.num_waiting == stats.blocks_owned == 0, stats
            assert stats.blocks_free + stats.blocks_cached == stats.blocks_total, stats
            assert not self._epoch.rows.num_live
            assert self._door.num_waiting == self._door.num_waiting_tokens == 0
            assert self._queue.is_empty()

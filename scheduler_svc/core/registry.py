"""The registry: which requests live, under which names, and what is still to be told about them.

Knows names, deadlines, counters and events; nothing of rows, blocks or order.
"""

import heapq
from collections import OrderedDict

import numpy as np

from scheduler_svc.core.contract import Cause, Finished, Output, Request, Started
from scheduler_svc.core.door import Door
from scheduler_svc.core.prompt_scores import PromptScores
from scheduler_svc.core.sequence import RequestState, Sequence, State
from scheduler_svc.core.story import Entry, Moment

NUM_OLD_STORIES = 256


class Registry:
    def __init__(self, door: Door) -> None:
        self._door = door
        self.requests: dict[str, RequestState] = {}
        self.sequences: dict[tuple[int, int], Sequence] = {}
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._old_stories: OrderedDict[str, RequestState] = OrderedDict()
        self._next_serial = 0
        # What happened outside commit, until somebody takes it.
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self.generation_tokens = 0
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.recomputed_tokens = 0

    # ---- coming ------------------------------------------------------------------------------------------------

    def add(self, request: Request, root: np.ndarray, now: float, at: Moment) -> RequestState:
        num_wanted = len(request.prompt) - 1 if request.sampling.HasField("prompt_logprobs") else 0
        scores = PromptScores(num_wanted, min(request.num_prompt_logprobs, num_wanted))
        state = RequestState(request, self._next_serial, root, now, scores)
        self._next_serial += 1
        prompt = np.ascontiguousarray(request.prompt, "<i4").tobytes()
        for choice in range(request.num_choices):
            sequence = Sequence(state, choice, bytearray(prompt))
            if request.delivered is not None:
                delivered = request.delivered[choice]
                if delivered.finished:
                    continue
                sequence.log += np.ascontiguousarray(delivered.token_ids, "<i4").tobytes()
                sequence.num_preemptions = delivered.num_preemptions
                sequence.num_resumes = delivered.num_resumes + 1
            state.sequences.append(sequence)
            self.sequences[request.session, sequence.handle] = sequence
            sequence.tell(at, "submitted", sequence.num_logged)
        if state.sequences:
            self.requests[request.request_id] = state
            self._door.enter(state)
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, state.serial, state))
        return state

    def expired(self, now: float) -> list[Sequence]:
        """Sequences whose deadline has passed."""
        late: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            late += heapq.heappop(self._deadlines)[2].sequences
        return late

    # ---- running -----------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence, num_cached: int, now: float) -> None:
        if sequence.num_lost_tokens:
            self.recomputed_tokens += max(sequence.num_lost_tokens - num_cached, 0)
            sequence.num_lost_tokens = 0
        if sequence.started:
            return
        sequence.started = True
        sequence.num_cached_tokens = min(num_cached, sequence.num_prompt)
        self._started.append(Started(sequence.request.session, sequence.handle, sequence.num_cached_tokens))
        state = sequence.state_of_request
        if not state.started:
            self._start(state)
            self.prompt_tokens += sequence.num_prompt
            self.prompt_tokens_cached += sequence.num_cached_tokens
            self._door.turn(state.request, state.arrived, now)

    def _start(self, state: RequestState) -> None:
        state.started = True
        self._door.leave(state)

    # ---- going -------------------------------------------------------------------------------------------------

    def remove(
        self, sequence: Sequence, cause: Cause, stop_token_id: int | None, message: str, *, told: bool, at: Moment
    ) -> None:
        """It is FINISHED; `told` says whether anybody is to hear of it."""
        request, state = sequence.request, sequence.state_of_request
        sequence.tell(at, f"finished {cause.name}", sequence.num_output)
        if told:
            self._finished.append(
                Finished(
                    session=request.session,
                    handle=sequence.handle,
                    cause=cause,
                    stop_token_id=stop_token_id,
                    num_output_tokens=sequence.num_output,
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_preemptions=sequence.num_preemptions,
                    num_resumes=sequence.num_resumes,
                    message=message,
                )
            )
        del self.sequences[request.session, sequence.handle]
        state.sequences.remove(sequence)
        if not state.sequences:
            if not state.started:
                self._start(state)
            del self.requests[request.request_id]
            self._old_stories[request.request_id] = state
            self._old_stories.move_to_end(request.request_id)
            if len(self._old_stories) > NUM_OLD_STORIES:
                self._old_stories.popitem(last=False)

    def take_events(self, output: Output) -> Output:
        """Moves into `output` what is still to be told."""
        output.started, output.finished = self._started, self._finished
        self._started, self._finished = [], []
        return output

    def forget_session(self, session: int) -> None:
        """Nothing more is told to it."""
        self._started = [event for event in self._started if event.session != session]
        self._finished = [event for event in self._finished if event.session != session]

    def story(self, request_id: str) -> list[Entry]:
        state = self.requests.get(request_id) or self._old_stories.get(request_id)
        return list(state.story) if state is not None else []

    def check(self) -> None:
        live = [sequence for state in self.requests.values() for sequence in state.sequences]
        assert {id(sequence) for sequence in live} == {id(sequence) for sequence in self.sequences.values()}
        for sequence in live:
            assert sequence.state is not State.FINISHED, sequence.state_of_request.story
        unstarted = [state for state in self.requests.values() if not state.started]
        assert self._door.num_waiting == len(unstarted)
        assert self._door.num_waiting_tokens == sum(len(state.request.prompt) for state in unstarted)

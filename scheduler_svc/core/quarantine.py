"""Quarantine: who may be the reason why executors die, and how the others are kept from sharing its fate.

A request is accused of a death when one of its sequences was being computed by a step in flight. It is cleared of all
its deaths once each of its sequences has passed the point that it had reached in the last one. After ALONE_FROM deaths
it is a suspect: suspects run before everybody else, those with most deaths first, and one at a time; nobody is admitted
until the suspect that runs is cleared or gone. After a death the first suspect is all that runs, so a death then is
evidence. With `max_deaths` of them, the last one alone, it is convicted: it ends and the others live.

Knows requests and their deaths, not why an executor was lost. An innocent request that is hit each time that somebody
kills executors faster than it passes its point is convicted as well; `max_deaths` says how many times that takes.
"""

from scheduler_svc.core.epoch import Epoch
from scheduler_svc.core.sequence import RequestState, Sequence, State

ALONE_FROM = 2


class Quarantine:
    def __init__(self, max_deaths: int):
        self._max_deaths = max_deaths
        # Requests with deaths they are not cleared of, by serial. Those that ended are dropped when they are met.
        self._accused: dict[int, RequestState] = {}

    @property
    def is_active(self) -> bool:
        """Whether anybody is accused: as long as nobody is, none of this costs anything."""
        return bool(self._accused)

    def accuse(self, epoch: Epoch) -> RequestState | None:
        """The executor of `epoch` is gone, its sequences have their seats still. Returns who is convicted."""
        if not epoch.in_flight:
            return None
        at_work = [sequence for sequence in epoch.rows.sequence if sequence is not None]
        at_work += epoch.finishing.values()
        requests = {sequence.serial: sequence.state_of_request for sequence in at_work}
        for state in requests.values():
            state.num_deaths += 1
        for sequence in at_work:
            reached = sequence.num_computed
            if sequence.state is State.RUNNING:
                reached = epoch.rows.num_computed(sequence.row)
            sequence.died_at = max(reached, sequence.died_at)
            num_deaths = sequence.state_of_request.num_deaths
            sequence.tell(epoch.planning, "was at work when an executor died", sequence.died_at, num_deaths)
        self._accused.update(requests)
        # Whoever shared a step in flight and has ended since may have been the reason.
        is_alone = len(requests) == 1 and all(step.num_rows <= len(at_work) for step in epoch.in_flight)
        last = at_work[0].state_of_request if at_work else None
        return last if last is not None and is_alone and last.num_deaths >= self._max_deaths else None

    def clear(self, epoch: Epoch) -> None:
        """A result was committed: whoever has passed the point of its death is innocent of it."""
        for serial, state in list(self._accused.items()):
            for sequence in state.sequences:
                if sequence.died_at and _has_passed(epoch, sequence):
                    sequence.died_at = 0
            if not any(sequence.died_at for sequence in state.sequences):
                state.num_deaths = 0
                del self._accused[serial]

    def suspect(self) -> RequestState | None:
        """The request that nobody else may be admitted beside; None: there is no suspect."""
        for serial, state in list(self._accused.items()):
            if not state.sequences:
                del self._accused[serial]
        suspects = [state for state in self._accused.values() if state.num_deaths >= ALONE_FROM]
        return max(suspects, key=lambda state: (state.num_deaths, -state.serial), default=None)


def _has_passed(epoch: Epoch, sequence: Sequence) -> bool:
    """It has drawn a token since it was seated, and one behind the point: what was in flight then is computed."""
    if sequence.state is not State.RUNNING:
        return False
    rows, row = epoch.rows, sequence.row
    return rows.num_committed(sequence) > max(sequence.died_at, int(rows.num_known[row]))


def first_waiting(state: RequestState) -> Sequence | None:
    """The sequence of it that may be admitted next; None: they have their seats, or wait for one of their own."""
    return next((sequence for sequence in state.sequences if sequence.ticket is not None), None)

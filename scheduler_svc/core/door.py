"""The door: how long a request that comes now would wait for its turn.

Knows how many wait in which class and how fast turns come; nothing of memory or rows. A queue that is longer than
anybody's patience serves only those who have left: beyond a point more load must mean more refusals, not fewer answers
in time. So the operator may bound the predicted wait, and a request that would exceed it is refused at once.

The prediction is those ahead of it times the interval between turns. Who is ahead is a matter of policy: under FAIR a
tenant waits for its own requests, with all tenants taking turns, so that one who floods is refused and others are not.
"""

from collections import Counter

from scheduler_svc.core.contract import Policy, Request
from scheduler_svc.core.sequence import RequestState

# Turns that the interval remembers, roughly.
MEMORY = 64
# Fewer tell nothing.
MIN_TURNS = 8


class Door:
    def __init__(self, policy: Policy):
        self._policy = policy
        # Requests of which no sequence has started, by priority and tenant.
        self._waiting: Counter[tuple[int, str]] = Counter()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        # Turns of requests that had to wait for them, and the seconds from the turn before; both fade.
        self._num_turns = 0.0
        self._turns_s = 0.0
        self._last_turn: float | None = None
        # Since when somebody has been waiting; meaningful while somebody is.
        self._crowded_since = 0.0

    def enter(self, state: RequestState) -> None:
        if not self.num_waiting:
            self._crowded_since = state.arrived
        self._waiting[state.request.priority, state.request.tenant] += 1
        self.num_waiting += 1
        self.num_waiting_tokens += len(state.request.prompt)

    def leave(self, state: RequestState) -> None:
        """It has started, or ended without."""
        key = state.request.priority, state.request.tenant
        self._waiting[key] -= 1
        if not self._waiting[key]:
            del self._waiting[key]
        self.num_waiting -= 1
        self.num_waiting_tokens -= len(state.request.prompt)

    def turn(self, arrived: float, now: float) -> None:
        """A request that arrived then starts now. Idle times between turns say nothing of how fast they could come."""
        if self._last_turn is not None and arrived <= self._last_turn:
            self._num_turns += 1
            self._turns_s += now - self._last_turn
            if self._num_turns > MEMORY:
                self._num_turns *= 0.5
                self._turns_s *= 0.5
        self._last_turn = now

    def wait_s(self, request: Request, now: float) -> float:
        """The predicted wait; 0 until something is known. A turn that is overdue counts as far as it is."""
        if self._num_turns < MIN_TURNS or self._last_turn is None or not self.num_waiting:
            return 0.0
        overdue_s = now - max(self._last_turn, self._crowded_since) - self._interval_s()
        return self._num_ahead(request) * self._interval_s() + max(overdue_s, 0.0)

    def retry_after_s(self, num_over: int) -> float:
        """When that many of those who wait will probably have started."""
        interval_s = self._interval_s() if self._num_turns else 0.05
        return min(max(interval_s * num_over, 0.1), 60.0)

    def _interval_s(self) -> float:
        return self._turns_s / self._num_turns

    def _num_ahead(self, request: Request) -> int:
        if self._policy is Policy.FCFS:
            return self.num_waiting
        own = request.priority
        above = sum(count for (priority, _), count in self._waiting.items() if priority < own)
        peers = {tenant: count for (priority, tenant), count in self._waiting.items() if priority == own}
        if self._policy is Policy.FAIR:
            mine = peers.get(request.tenant, 0)
            others = (count for tenant, count in peers.items() if tenant != request.tenant)
            return above + mine + sum(min(count, mine + 1) for count in others)
        return above + sum(peers.values())

"""The door: who may still join the queue, and how long a request that comes now would wait for its turn.

Knows how many wait in which class and how fast turns come; nothing of memory or rows. The queue is bounded in requests
and in tokens, in all and for each tenant; a refusal says which bound it was and when to come back.

A queue that is longer than anybody's patience serves only those who have left: beyond a point more load must mean more
refusals, not fewer answers in time. So the operator may bound the predicted wait, and a request that would exceed it is
refused at once.

The prediction is those ahead of it times the interval between turns. Who is ahead is a matter of policy. Under FAIR it
is only the tenant's own requests, times the interval between its own turns: whose turn it is follows from the tokens
that each tenant was served, so one that is ahead of its share may see none for a while. As long as too few of its turns
are known, tenants are believed to take turns one by one. So one who floods is refused and others are not.
"""

from collections import Counter

from scheduler_svc.core.contract import Limits, Policy, Request
from scheduler_svc.core.sequence import RequestState
from scheduler_svc.errors import QueueFull

# Turns that the interval remembers, roughly.
MEMORY = 64
# Fewer tell nothing.
MIN_TURNS = 8
# Of idle tenants beyond these the pace is forgotten.
MAX_TENANTS = 4096


class Pace:
    """How fast turns come: all of them, or those of one tenant."""

    def __init__(self) -> None:
        # Turns of requests that had to wait for them, and the seconds from the turn before; both fade.
        self._num_turns = 0.0
        self._turns_s = 0.0
        self._last_turn: float | None = None
        # Since when somebody has been waiting; meaningful while somebody is.
        self.crowded_since = 0.0

    def turn(self, arrived: float, now: float) -> None:
        """A request that arrived then starts now. Idle times between turns say nothing of how fast they could come."""
        if self._last_turn is not None and arrived <= self._last_turn:
            self._num_turns += 1
            self._turns_s += now - self._last_turn
            if self._num_turns > MEMORY:
                self._num_turns *= 0.5
                self._turns_s *= 0.5
        self._last_turn = now

    @property
    def is_known(self) -> bool:
        return self._num_turns >= MIN_TURNS

    def interval_s(self, default: float = 0.0) -> float:
        return self._turns_s / self._num_turns if self._num_turns else default

    def wait_s(self, num_ahead: int, now: float) -> float:
        """Until so many have had their turn. A turn that is overdue counts as far as it is. Of a known pace."""
        assert self._last_turn is not None
        overdue_s = now - max(self._last_turn, self.crowded_since) - self.interval_s()
        return num_ahead * self.interval_s() + max(overdue_s, 0.0)


class Door:
    def __init__(self, limits: Limits):
        self._limits = limits
        self._policy = limits.policy
        # Requests of which no sequence has started, by priority and tenant.
        self._waiting: Counter[tuple[int, str]] = Counter()
        self.num_waiting = 0
        self.num_waiting_tokens = 0
        self._num_of_tenant: Counter[str] = Counter()
        self._num_tokens_of_tenant: Counter[str] = Counter()
        self._pace = Pace()
        # Under FAIR.
        self._pace_of_tenant: dict[str, Pace] = {}

    def enter(self, state: RequestState) -> None:
        if not self.num_waiting:
            self._pace.crowded_since = state.arrived
        if self._policy is Policy.FAIR and not self._num_of_tenant[state.request.tenant]:
            self._pace_of(state.request.tenant).crowded_since = state.arrived
        self._count(state.request, 1)

    def leave(self, state: RequestState) -> None:
        """It has started, or ended without."""
        self._count(state.request, -1)

    def turn(self, request: Request, arrived: float, now: float) -> None:
        """A request that arrived then starts now."""
        self._pace.turn(arrived, now)
        if self._policy is Policy.FAIR:
            self._pace_of(request.tenant).turn(arrived, now)

    def _pace_of(self, tenant: str) -> Pace:
        paces = self._pace_of_tenant
        if len(paces) > MAX_TENANTS:
            for idle in [other for other in paces if other not in self._num_of_tenant]:
                del paces[idle]
        return paces.setdefault(tenant, Pace())

    def _count(self, request: Request, change: int) -> None:
        tenant, num_tokens = request.tenant, change * len(request.prompt)
        self.num_waiting += change
        self.num_waiting_tokens += num_tokens
        self._waiting[request.priority, tenant] += change
        self._num_of_tenant[tenant] += change
        self._num_tokens_of_tenant[tenant] += num_tokens
        if not self._waiting[request.priority, tenant]:
            del self._waiting[request.priority, tenant]
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant], self._num_tokens_of_tenant[tenant]

    # ---- who may join ------------------------------------------------------------------------------------------

    def check(self, request: Request, now: float) -> None:
        """Raises QueueFull if it may not join the queue; says which bound that was, and when to come back. Whoever
        finds nobody waiting is within a bound in tokens, however many it has: else it could never come."""
        limits, num_tokens = self._limits, len(request.prompt)
        mine, my_tokens = self._num_of_tenant[request.tenant], self._num_tokens_of_tenant[request.tenant]
        for who, name, unit, most, waiting, more in (
            ("the", "max_waiting", "requests", limits.max_waiting, self.num_waiting, 1),
            ("the", "max_waiting_tokens", "tokens", limits.max_waiting_tokens, self.num_waiting_tokens, num_tokens),
            ("the tenant's", "max_waiting_per_tenant", "requests", limits.max_waiting_per_tenant, mine, 1),
            (
                *("the tenant's", "max_waiting_tokens_per_tenant", "tokens", limits.max_waiting_tokens_per_tenant),
                *(my_tokens, num_tokens),
            ),
        ):
            if most is not None and waiting and waiting + more > most:
                num_over = waiting + more - most if unit == "requests" else 1
                # A tenant's own turns come as often as its share of the queue.
                num_turns = num_over * (self.num_waiting / mine if who != "the" else 1)
                raise QueueFull(
                    f"{who} queue is full: {name} is {most} {unit}", retry_after_s=self.retry_after_s(num_turns)
                )
        self._check_wait(request, now)

    def _check_wait(self, request: Request, now: float) -> None:
        most_s = self._limits.max_wait_s
        if most_s is None:
            return
        wait_s = self.wait_s(request, now)
        if wait_s > most_s:
            raise QueueFull(
                f"its turn would come in {wait_s:.1f} s, max_wait is {most_s:g} s",
                retry_after_s=max(wait_s - most_s, 0.1),
            )

    # ---- how long a wait ---------------------------------------------------------------------------------------

    def wait_s(self, request: Request, now: float) -> float:
        """The predicted wait; 0 until something is known."""
        if not self._pace.is_known or not self.num_waiting:
            return 0.0
        own = self._pace_of_tenant.get(request.tenant)
        if own is not None and own.is_known and self._num_of_tenant[request.tenant]:
            return own.wait_s(self._num_own_ahead(request), now)
        return self._pace.wait_s(self._num_ahead(request), now)

    def retry_after_s(self, num_turns: float) -> float:
        """When there will probably have been that many turns."""
        return min(max(self._pace.interval_s(0.05) * num_turns, 0.1), 60.0)

    def _num_own_ahead(self, request: Request) -> int:
        return sum(
            count
            for (priority, tenant), count in self._waiting.items()
            if tenant == request.tenant and priority <= request.priority
        )

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

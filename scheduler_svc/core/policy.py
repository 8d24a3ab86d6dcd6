"""Order: who among those that wait is admitted next.

Knows the waiting sequences and the service each tenant has had, not memory or rows. One class, three orders:

    FCFS      arrival
    PRIORITY  priority class, then arrival
    FAIR      priority class, then the tenant that has been served least, then arrival

Nobody is overtaken without bound: of every AGEING admissions at least one goes to whoever waits longest. A preempted
sequence comes back with the arrival it had, so it outranks the newcomers of its class.

Service is a virtual token counter per tenant: input tokens that had to be computed, and output tokens, weighted. A
tenant that comes back from idleness starts at the smallest counter of those that are active: idle time saves up no
claim.
"""

import heapq
from collections.abc import Iterator

from scheduler_svc.core.contract import Policy
from scheduler_svc.core.sequence import Sequence, State

AGEING = 16
# Idle tenants beyond these are forgotten; coming back, they start with the active ones.
MAX_TENANTS = 4096
INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2

Entry = tuple[int, int, int, Sequence]  # serial, choice, ticket


class WaitingQueue:
    def __init__(self, policy: Policy):
        self.policy = policy
        self._next_ticket = 0
        # Heaps of entries by (priority class, tenant); which parts count is the policy's business. Entries whose ticket
        # is no longer the sequence's are dropped when they surface.
        self._heaps: dict[tuple[int, str], list[Entry]] = {}
        self._by_arrival: list[Entry] = []
        self._num_since_oldest = 0
        self.service: dict[str, int] = {}
        # Sequences not finished, per tenant: a tenant with none is idle.
        self._num_active: dict[str, int] = {}

    # ---- waiting -----------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        self._next_ticket += 1
        sequence.ticket = self._next_ticket
        entry = (sequence.serial, sequence.choice, self._next_ticket, sequence)
        heapq.heappush(self._heaps.setdefault(self._class_of(sequence), []), entry)
        if self.policy is not Policy.FCFS:
            heapq.heappush(self._by_arrival, entry)

    def head(self) -> Sequence | None:
        """Whose turn it is; stays the head until it is removed."""
        if self._num_since_oldest >= AGEING and self._prune(self._by_arrival):
            return self._by_arrival[0][3]
        heads = [(key, heap[0]) for key, heap in self._live_heaps()]
        if not heads:
            return None
        _, entry = min(heads, key=lambda head: (head[0][0], self.service.get(head[0][1], 0), head[1][0], head[1][1]))
        return entry[3]

    def remove(self, sequence: Sequence, *, admitted: bool) -> None:
        """It is admitted, or waits elsewhere, or is gone."""
        if admitted and self._prune(self._by_arrival):
            oldest = self._by_arrival[0][3] is sequence
            self._num_since_oldest = 0 if oldest else self._num_since_oldest + 1
        sequence.ticket = None

    def is_empty(self) -> bool:
        return next(self._live_heaps(), None) is None

    def rank(self, sequence: Sequence) -> int:
        """Running order: the largest is preempted first. Below 2^62."""
        order = (sequence.serial << 5) + sequence.choice
        return order if self.policy is Policy.FCFS else ((sequence.request.priority + 128) << 54) + order

    def _class_of(self, sequence: Sequence) -> tuple[int, str]:
        request = sequence.request
        return (
            0 if self.policy is Policy.FCFS else request.priority,
            request.tenant if self.policy is Policy.FAIR else "",
        )

    def _live_heaps(self) -> Iterator[tuple[tuple[int, str], list[Entry]]]:
        for key in list(self._heaps):
            heap = self._heaps[key]
            if self._prune(heap):
                yield key, heap
            else:
                del self._heaps[key]

    @staticmethod
    def _prune(heap: list[Entry]) -> bool:
        """Drops dead entries from the top; whether one is left."""
        while heap and heap[0][3].ticket != heap[0][2]:
            heapq.heappop(heap)
        return bool(heap)

    # ---- service -----------------------------------------------------------------------------------------------

    def arrive(self, tenant: str, num_sequences: int) -> None:
        """Called before the first push of a request."""
        if self.policy is not Policy.FAIR:
            return
        if not self._num_active.get(tenant):
            active = [self.service[other] for other in self._num_active]
            self.service[tenant] = max(self.service.get(tenant, 0), min(active, default=0))
        self._num_active[tenant] = self._num_active.get(tenant, 0) + num_sequences

    def depart(self, sequence: Sequence) -> None:
        """It has finished."""
        sequence.ticket = None
        if self.policy is Policy.FAIR:
            tenant = sequence.request.tenant
            self.service[tenant] += (sequence.num_output - sequence.num_charged) * OUTPUT_WEIGHT
            self._num_active[tenant] -= 1
            if not self._num_active[tenant]:
                del self._num_active[tenant]
                if len(self.service) > MAX_TENANTS:
                    del self.service[tenant]

    def charge_admission(self, sequence: Sequence, num_input: int, num_expected: int) -> None:
        """For the tokens it computes, and in advance for the output it will probably draw: if that were charged as it
        comes, a tenant would be let in long after it had its share, and then kept out as long. Under FAIR."""
        self.service[sequence.request.tenant] += num_input * INPUT_WEIGHT
        self.charge_output(sequence, sequence.num_output + num_expected)

    def charge_output(self, sequence: Sequence, num_output: int) -> None:
        """For its output up to there, under FAIR, as far as it was not charged; at block boundaries, so that it costs
        nothing between them. What was charged in vain is given back when it departs."""
        num_more = num_output - sequence.num_charged
        if num_more > 0:
            self.service[sequence.request.tenant] += num_more * OUTPUT_WEIGHT
            sequence.num_charged = num_output

    def check(self) -> None:
        for heap in self._heaps.values():
            for _, _, ticket, sequence in heap:
                if sequence.ticket == ticket:
                    assert sequence.state is State.WAITING, sequence
        assert all(count > 0 for count in self._num_active.values())

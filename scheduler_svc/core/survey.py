"""A survey: what the core holds at one moment, for somebody who watches. Reads everything, changes nothing.

Made on demand alone: nothing here keeps anything up to date, so a step costs the same whether or not there is such a
thing. Its own cost is a few array operations over rows and blocks, and Python for as many sequences as are shown.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from scheduler_svc.core.epoch import Epoch
from scheduler_svc.core.registry import Registry
from scheduler_svc.core.sequence import Sequence, State

FREE, CACHED, OWNED = 0, 1, 2
MAX_CELLS = 16_384
MAX_RUNNING = 256
MAX_WAITING = 64
# Sequences looked at for the numbers of tenants and of those that wait.
MAX_WALK = 8192
MAX_TENANTS = 16
MAX_SHARED = 8


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence; counts of tokens."""

    request_id: str
    tenant: str
    row: int
    num_prompt: int
    num_computed: int
    num_output: int
    max_tokens: int
    num_shared: int
    num_preemptions: int
    age_s: float


@dataclass(slots=True)
class TenantView:
    name: str
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_output: int = 0


@dataclass(frozen=True, slots=True)
class SharedView:
    """A prefix that several running sequences hold; `of` is one of them."""

    num_sequences: int
    num_blocks: int
    of: Sequence


@dataclass(slots=True)
class Survey:
    # uint8 [at most MAX_CELLS]: 0 free, 1 cached, n + 1 owned by n.
    cells: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    num_shared_blocks: int = 0
    block_size: int = 0
    running: list[SequenceView] = field(default_factory=list)
    waiting: list[SequenceView] = field(default_factory=list)
    shared: list[SharedView] = field(default_factory=list)
    tenants: list[TenantView] = field(default_factory=list)
    # Sequences of each session, among those looked at.
    num_of_session: dict[int, int] = field(default_factory=dict)


def survey(registry: Registry, epoch: Epoch | None, now: float) -> Survey:
    seen = Survey()
    tenants: dict[str, TenantView] = {}
    for sequence in islice(registry.sequences.values(), MAX_WALK):
        session = sequence.request.session
        seen.num_of_session[session] = seen.num_of_session.get(session, 0) + 1
        tenant = _tenant(tenants, sequence)
        if sequence.state is State.WAITING:
            tenant.num_waiting += 1
            if len(seen.waiting) < MAX_WAITING:
                seen.waiting.append(_view(sequence, now, 0, sequence.num_computed, sequence.num_output, 0))
    if epoch is not None:
        _survey_epoch(seen, epoch, tenants, now)
    ordered = sorted(tenants.values(), key=lambda t: (-t.num_blocks, -t.num_running, -t.num_waiting, t.name))
    seen.tenants = ordered[:MAX_TENANTS]
    return seen


def _survey_epoch(seen: Survey, epoch: Epoch, tenants: dict[str, TenantView], now: float) -> None:
    rows, pool = epoch.rows, epoch.memory.pool
    live = np.flatnonzero(rows.seat)
    computed = rows.lead[live] + rows.step
    num_blocks = rows.num_slots(live, computed) // rows.block_size
    tables = rows.table[live, : int(num_blocks.max(initial=0))]
    held = np.arange(tables.shape[1]) < num_blocks[:, None]
    num_owners = np.bincount(tables[held], minlength=pool.num_blocks)
    for sequence in epoch.finishing.values():
        num_owners[sequence.blocks] += 1
    states = np.where(num_owners > 0, np.minimum(num_owners + 1, 255), pool.is_named * CACHED).astype(np.uint8)
    seen.cells = grouped(states, MAX_CELLS)
    seen.num_shared_blocks = int((num_owners > 1).sum())
    seen.block_size = rows.block_size
    seen.shared = list(_shared(epoch, live, num_blocks, tables))

    columns = (live, computed, rows.num_shared[live], num_blocks)
    for row, num_computed, num_shared, count in zip(*(column.tolist() for column in columns), strict=True):
        running = rows.seated(row)
        num_output = rows.num_committed(running) - running.num_prompt
        tenant = _tenant(tenants, running)
        tenant.num_running += 1
        tenant.num_blocks += count
        tenant.num_output += num_output
        if len(seen.running) < MAX_RUNNING:
            seen.running.append(_view(running, now, row, num_computed, num_output, num_shared))


def grouped(states: np.ndarray, most: int) -> np.ndarray:
    """uint8 [at most `most`]: neighbours in equal groups, each shown by the state most of it are in.

    `states` uint8 [N] as in Survey.cells. Of equally frequent states the one that holds more is shown; a group that is
    mostly shared is shown by its most shared block.
    """
    size = -(-len(states) // most)
    if size <= 1:
        return states
    starts = np.arange(0, len(states), size)
    kinds = np.minimum(states, OWNED + 1)
    counts = np.stack([np.add.reduceat((kinds == kind).astype(np.int32), starts) for kind in range(OWNED + 2)])
    most_frequent = OWNED + 1 - counts[::-1].argmax(axis=0)
    return np.where(most_frequent > OWNED, np.maximum.reduceat(states, starts), most_frequent).astype(np.uint8)


def _shared(epoch: Epoch, live: np.ndarray, num_blocks: np.ndarray, tables: np.ndarray) -> Iterator[SharedView]:
    """Running sequences whose tables begin with the same block have a prefix in common."""
    with_blocks = num_blocks > 0
    live, num_blocks = live[with_blocks], num_blocks[with_blocks]
    if not len(live):
        return
    tables = tables[with_blocks]
    _, which, counts = np.unique(tables[:, 0], return_inverse=True, return_counts=True)
    for group in np.argsort(-counts, kind="stable")[:MAX_SHARED].tolist():
        members = np.flatnonzero(which == group)
        if len(members) < 2:
            return
        common = tables[members, : int(num_blocks[members].min())]
        same = (common == common[0]).all(axis=0)
        length = len(same) if same.all() else int(same.argmin())
        yield SharedView(len(members), length, epoch.rows.seated(int(live[members[0]])))


def _tenant(tenants: dict[str, TenantView], sequence: Sequence) -> TenantView:
    name = sequence.request.tenant
    return tenants.setdefault(name, TenantView(name))


def _view(
    sequence: Sequence, now: float, row: int, num_computed: int, num_output: int, num_shared: int
) -> SequenceView:
    return SequenceView(
        request_id=sequence.request.request_id,
        tenant=sequence.request.tenant,
        row=row,
        num_prompt=sequence.num_prompt,
        num_computed=num_computed,
        num_output=num_output,
        max_tokens=sequence.request.max_tokens,
        num_shared=num_shared,
        num_preemptions=sequence.num_preemptions,
        age_s=now - sequence.state_of_request.arrived,
    )

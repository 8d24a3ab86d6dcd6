"""Permanent rows: everything the executor remembers about the sequences that are seated.

A sequence sits in one row from Admit to release; its tokens and block table cross the wire once and grow in place. This
file checks every number of a plan before anything uses it as an index: a plan that breaks the contract raises
PlanViolation and ends the epoch. It knows nothing of devices, models or sockets.

Invariants, for every live row:
    0 <= num_computed < num_known <= max_model_len + 1      (the newest token is never computed before it is known)
    num_computed <= num_blocks * block_size                 (what is stored has a block)
    0 <= block_table < pool size, also beyond num_blocks    (stale entries stay valid indices)

            num_prompt        num_computed        num_known
    tokens ─────┼──────────────────┼──────────────────┼─ ─ ─ ─
             prompt      output, K and V stored       still to compute
"""

from dataclasses import dataclass

import numpy as np

from executor_svc.constraints import Grammars
from executor_svc.errors import ComputeFault, NotFinite, PlanViolation
from executor_svc.sampling import SamplingTable
from protos.stepwire.wire.v1 import step_pb2

# What a device draws where the logits are not finite.
NO_NUMBER = -1
# As a token id: the one its row drew last, which only the device knows yet.
NEWEST = -1


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan asks to be computed, checked: the rows that compute at least one token."""

    rows: np.ndarray  # int32 [R], ascending
    num_tokens: np.ndarray  # int32 [R], at least 1 each
    samples: np.ndarray  # bool [R]: the row computes its newest token, so a token is drawn for it
    copy: np.ndarray  # int32 [N, 2], (source, destination): no destination twice, none that is also a source


@dataclass(frozen=True, slots=True)
class Due:
    """Where the tokens belong that a launched step draws."""

    rows: np.ndarray  # int32 [S]
    places: np.ndarray  # int32 [S]: in their rows
    seatings: np.ndarray  # int64 [S]: who sat there; a token of someone who left belongs nowhere


class RowTable:
    def __init__(self, geometry: step_pb2.Geometry, grammars: Grammars | None = None):
        num_rows = geometry.max_num_seqs
        self.geometry = geometry
        self.max_blocks = -(-geometry.max_model_len // geometry.block_size)
        # Not zeroed: the system hands out a page when a row first writes to it.
        self.tokens = np.empty((num_rows, geometry.max_model_len + 1), np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.block_table = np.zeros((num_rows, self.max_blocks), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.live = np.zeros(num_rows, bool)
        # How often each row was given to a sequence.
        self.seatings = np.zeros(num_rows, np.int64)
        self.sampling = SamplingTable(num_rows, geometry.vocab_size, grammars)

    def reset(self) -> None:
        self.live[:] = False
        self.sampling.reset()

    # ---- a plan comes in ------------------------------------------------------------------------------------

    def apply(self, plan: step_pb2.StepPlan) -> Work:
        """Applies release, admit, copy and grow in this order and returns the work of the step."""
        self._release(_integers(plan.release, "release"))
        for admit in plan.admit:
            self._admit(admit)
        copy = self._checked_copy(_pairs(plan.copy, "copy"))
        self._grow(_pairs(plan.grow, "grow"))
        return self._work(_pairs(plan.prefill, "prefill"), copy)

    def _release(self, rows: np.ndarray) -> None:
        if not rows.size:
            return
        self._check_live(rows, "release")
        if len(np.unique(rows)) != len(rows):
            raise PlanViolation("release: a row is named twice")
        self.live[rows] = False

    def _admit(self, admit: step_pb2.Admit) -> None:
        row = admit.row
        if row >= len(self.live):
            raise PlanViolation(f"admit: row {row} is not below {len(self.live)}")
        if self.live[row]:
            raise PlanViolation(f"admit: row {row} is taken")
        tokens = _integers(admit.token_ids, "admit.token_ids")
        blocks = _integers(admit.block_ids, "admit.block_ids")
        self._check_admit_sizes(admit, len(tokens), len(blocks))
        _check_range(tokens, self.geometry.vocab_size, "admit.token_ids")
        _check_range(blocks, self.geometry.num_blocks, "admit.block_ids")
        self.sampling.set(row, admit.sampling)
        self.tokens[row, : len(tokens)] = tokens
        self.num_known[row] = len(tokens)
        self.num_prompt[row] = admit.num_prompt_tokens
        self.num_computed[row] = admit.num_computed_tokens
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.live[row] = True
        self.seatings[row] += 1

    def _check_admit_sizes(self, admit: step_pb2.Admit, num_tokens: int, num_blocks: int) -> None:
        where = f"admit: row {admit.row}"
        if not 1 <= num_tokens <= self.geometry.max_model_len:
            raise PlanViolation(f"{where}: {num_tokens} tokens, allowed are 1..{self.geometry.max_model_len}")
        if not 1 <= admit.num_prompt_tokens <= num_tokens:
            raise PlanViolation(f"{where}: {admit.num_prompt_tokens} prompt tokens of {num_tokens}")
        if num_blocks > self.max_blocks:
            raise PlanViolation(f"{where}: {num_blocks} blocks, a table holds {self.max_blocks}")
        stored = admit.num_computed_tokens
        if stored >= num_tokens or stored > num_blocks * self.geometry.block_size:
            raise PlanViolation(f"{where}: {stored} computed tokens of {num_tokens} in {num_blocks} blocks")

    def _checked_copy(self, pairs: np.ndarray) -> np.ndarray:
        if pairs.size:
            _check_range(pairs, self.geometry.num_blocks, "copy")
            destinations = pairs[:, 1]
            if len(np.unique(destinations)) != len(destinations) or np.isin(destinations, pairs[:, 0]).any():
                raise PlanViolation("copy: a destination is written twice or is also a source")
        return pairs

    def _grow(self, pairs: np.ndarray) -> None:
        if not pairs.size:
            return
        rows, blocks = pairs[:, 0], pairs[:, 1]
        self._check_live(rows, "grow")
        _check_range(blocks, self.geometry.num_blocks, "grow")
        # A row may grow by several blocks: entry i of a row goes i places behind the end of its table.
        order = np.argsort(rows, kind="stable")
        rows, blocks = rows[order], blocks[order]
        distinct, first, counts = np.unique(rows, return_index=True, return_counts=True)
        if (self.num_blocks[distinct] + counts > self.max_blocks).any():
            raise PlanViolation(f"grow: a table would hold more than {self.max_blocks} blocks")
        places = self.num_blocks[rows] + np.arange(len(rows)) - np.repeat(first, counts)
        self.block_table[rows, places] = blocks
        self.num_blocks[distinct] += counts.astype(np.int32)

    def _work(self, prefill: np.ndarray, copy: np.ndarray) -> Work:
        rows = np.flatnonzero(self.live).astype(np.int32)
        known, computed = self.num_known[rows], self.num_computed[rows]
        num_tokens = np.ones(len(rows), np.int32)
        catching_up = self._place_prefill(prefill, rows, num_tokens)
        remaining = known - computed
        if ((remaining != 1) & ~catching_up).any():
            raise PlanViolation("prefill: a row that is not named has more than its newest token to compute")
        if (num_tokens > remaining).any():
            raise PlanViolation("prefill: more tokens than the row has left")
        active = num_tokens > 0
        rows, num_tokens, remaining = rows[active], num_tokens[active], remaining[active]
        samples = num_tokens == remaining
        self._check_room(rows, num_tokens, samples)
        return Work(rows, num_tokens, samples, copy)

    def _place_prefill(self, prefill: np.ndarray, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Writes the counts of the named rows into num_tokens; returns which entries were named."""
        named = np.zeros(len(rows), bool)
        if prefill.size:
            self._check_live(prefill[:, 0], "prefill")
            if (np.diff(prefill[:, 0]) <= 0).any():
                raise PlanViolation("prefill: rows are not ascending")
            if prefill[:, 1].min() < 0:
                raise PlanViolation("prefill: a negative number of tokens")
            places = np.searchsorted(rows, prefill[:, 0])
            named[places] = True
            num_tokens[places] = prefill[:, 1]
        return named

    def _check_room(self, rows: np.ndarray, num_tokens: np.ndarray, samples: np.ndarray) -> None:
        if num_tokens.sum(dtype=np.int64) > self.geometry.max_num_batched_tokens:
            raise PlanViolation(f"step: more than {self.geometry.max_num_batched_tokens} tokens")
        if (self.num_computed[rows] + num_tokens > self.num_blocks[rows] * self.geometry.block_size).any():
            raise PlanViolation("step: a row computes beyond the end of its block table")
        if (self.num_known[rows[samples]] >= self.tokens.shape[1]).any():
            raise PlanViolation(f"step: a row would grow beyond {self.geometry.max_model_len} tokens")

    def _check_live(self, rows: np.ndarray, what: str) -> None:
        _check_range(rows, len(self.live), what)
        if not self.live[rows].all():
            raise PlanViolation(f"{what}: a row is not live")

    # ---- the step is launched, the step is done -------------------------------------------------------------

    def needs_drawn(self, work: Work) -> bool:
        """Whether what a row of the step may draw depends on a token that only the device knows yet."""
        sampled = work.rows[work.samples]
        unknown = self.tokens[sampled, self.num_known[sampled] - 1] == NEWEST
        return bool((unknown & self.sampling.masks_change(sampled)).any())

    def advance(self, work: Work) -> Due:
        """What the step computes counts as stored, and each row that draws has a newest token, not known yet."""
        sampled = work.rows[work.samples]
        self.num_computed[work.rows] += work.num_tokens
        due = Due(sampled, self.num_known[sampled], self.seatings[sampled])
        self.tokens[sampled, due.places] = NEWEST
        self.num_known[sampled] += 1
        return due

    def settle(self, due: Due, token_ids: np.ndarray) -> None:
        """The drawn tokens have arrived. Raises ComputeFault when they cannot be right."""
        if len(token_ids) != len(due.rows):
            raise ComputeFault(f"the backend drew {len(token_ids)} tokens for {len(due.rows)} rows")
        if (token_ids == NO_NUMBER).any():
            raise NotFinite("the model's logits are not finite")
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= self.geometry.vocab_size):
            raise ComputeFault("the backend drew a token outside the vocabulary")
        stayed = self.seatings[due.rows] == due.seatings
        self.tokens[due.rows[stayed], due.places[stayed]] = token_ids[stayed]

    def append(self, work: Work, token_ids: np.ndarray) -> None:
        """A step whose tokens are there at once."""
        self.settle(self.advance(work), token_ids)

    def digest(self) -> tuple[int, int]:
        """(live rows, tokens stored by them): the scheduler compares it with its own count."""
        return int(self.live.sum()), int(self.num_computed[self.live].sum(dtype=np.int64))


def _integers(data: bytes, what: str) -> np.ndarray:
    if len(data) % 4:
        raise PlanViolation(f"{what}: {len(data)} bytes are not int32s")
    return np.frombuffer(data, "<i4")


def _pairs(data: bytes, what: str) -> np.ndarray:
    if len(data) % 8:
        raise PlanViolation(f"{what}: {len(data)} bytes are not pairs of int32s")
    return np.frombuffer(data, "<i4").reshape(-1, 2)


def _check_range(values: np.ndarray, bound: int, what: str) -> None:
    if values.size and (values.min() < 0 or values.max() >= bound):
        raise PlanViolation(f"{what}: {values.min()}..{values.max()} is not within 0..{bound - 1}")

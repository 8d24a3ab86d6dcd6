"""HashExec: an executor without a model, for exact tests of the scheduler.

Its KV slots store token ids. The next token of a row is a hash of the ids it reads through the row's block table, of
its seed, its choice and its position. A wrong, stale, foreign or unfilled block, a missed copy, an off-by-one: each
changes the output. What the output should be takes no blocks at all: see `oracle`.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Geometry, Request

NOTHING = -1
NEVER = 2**31


def next_token(known: np.ndarray, seed: int, choice: int, vocab_size: int) -> int:
    digest = hashlib.blake2b(known.astype("<i4").tobytes(), digest_size=8, person=b"%d.%d" % (seed % 100_000, choice))
    return int.from_bytes(digest.digest(), "little") % vocab_size


def score(known: np.ndarray, target: int) -> float:
    """What HashExec says of a prompt's token after those before it."""
    return -float(int(known.sum()) + 100 * target)


def oracle(request: Request, choice: int, geometry: Geometry) -> tuple[list[int], str]:
    """What this choice must stream, and how it must end, computed alone and at once."""
    known = request.prompt.tolist()
    output: list[int] = []
    while True:
        if len(output) >= request.max_tokens or len(known) >= geometry.max_model_len:
            return output, "LENGTH"
        token = next_token(np.array(known), request.sampling.seed, choice, geometry.vocab_size)
        known.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= request.min_tokens:
            return output, "STOP"


class Died(Exception):
    """The executor's process is gone, in the middle of a step."""


@dataclass(slots=True)
class Row:
    tokens: list[int]
    table: list[int]
    num_computed: int
    num_prompt: int
    sampling: step_pb2.Sampling


class HashExec:
    """Applies plans exactly as step.proto says, and asserts everything a plan must keep to."""

    def __init__(self, geometry: Geometry, boot_id: int, epoch: int):
        self.geometry = geometry
        self.boot_id = boot_id
        self.epoch = epoch
        self.step_id = 0
        self.rows: dict[int, Row] = {}
        self.kv = np.full((geometry.num_blocks, geometry.block_size), NOTHING, np.int32)
        self.num_scheduled_tokens = 0
        # Poison: who computes the token at this position, by seed, kills the executor.
        self.poison: dict[int, int] = {}

    def run(self, plan: step_pb2.StepPlan) -> step_pb2.StepResult:
        assert (plan.boot_id, plan.epoch, plan.step_id) == (self.boot_id, self.epoch, self.step_id + 1)
        self.step_id += 1
        self._apply(plan)
        chunks = dict(_pairs(plan.prefill))
        assert list(chunks) == sorted(chunks), "prefill rows ascend"
        assert set(chunks) <= set(self.rows)
        result = step_pb2.StepResult(boot_id=self.boot_id, epoch=self.epoch, step_id=self.step_id)
        for row in sorted(self.rows):
            begin = self.rows[row].num_computed
            self._compute(self.rows[row], chunks.get(row))
            self._score(row, self.rows[row], begin, result)
        self.num_scheduled_tokens = sum(chunks.get(row, 1) for row in self.rows)
        assert self.num_scheduled_tokens <= self.geometry.max_num_batched_tokens
        result.forward_us = 1000 + 10 * self.num_scheduled_tokens
        drawn = [self._draw(row, self.rows[row], result) for row in sorted(self.rows) if self._answers(row)]
        result.token_ids = np.array(drawn, "<i4").tobytes()
        result.num_rows = len(self.rows)
        result.num_stored_tokens = sum(row.num_computed for row in self.rows.values())
        return result

    def _apply(self, plan: step_pb2.StepPlan) -> None:
        for row in np.frombuffer(plan.release, "<i4").tolist():
            del self.rows[row]
        for admit in plan.admit:
            assert admit.row not in self.rows
            assert admit.row < self.geometry.max_num_seqs
            tokens = np.frombuffer(admit.token_ids, "<i4").tolist()
            assert admit.num_computed_tokens < len(tokens), "the last known token is always computed"
            assert 0 < admit.num_prompt_tokens <= len(tokens)
            table = np.frombuffer(admit.block_ids, "<i4").tolist()
            self.rows[admit.row] = Row(
                tokens, table, admit.num_computed_tokens, admit.num_prompt_tokens, admit.sampling
            )
        for source, destination in _pairs(plan.copy):
            self.kv[destination] = self.kv[source]
        for row, block in _pairs(plan.grow):
            self.rows[row].table.append(block)
        assert all(block < self.geometry.num_blocks for row in self.rows.values() for block in row.table)

    def _compute(self, row: Row, chunk: int | None) -> None:
        if chunk is None:
            chunk = 1
            assert row.num_computed == len(row.tokens) - 1, "a row that is not in prefill computes its newest token"
        for position in range(row.num_computed, row.num_computed + chunk):
            block = row.table[position // self.geometry.block_size]
            self.kv[block, position % self.geometry.block_size] = row.tokens[position]
        row.num_computed += chunk
        if row.num_computed > self.poison.get(row.sampling.seed, NEVER):
            raise Died
        assert row.num_computed <= len(row.tokens)

    def _score(self, index: int, row: Row, begin: int, result: step_pb2.StepResult) -> None:
        """In two parts where there are two tokens or more, as an executor may."""
        places = list(range(begin, min(row.num_computed, row.num_prompt - 1)))
        if not row.sampling.HasField("prompt_logprobs"):
            return
        read = self.kv[row.table].ravel()
        for part in (places[:1], places[1:]):
            if part:
                values = [score(read[: p + 1], row.tokens[p + 1]) for p in part]
                result.prompt_logprobs.add(
                    row=index,
                    first_position=part[0] + 1,
                    logprobs=np.array(values, "<f4").tobytes(),
                    ranks=np.ones(len(part), "<i4").tobytes(),
                )

    def _answers(self, index: int) -> bool:
        row = self.rows[index]
        return row.num_computed == len(row.tokens)

    def _draw(self, index: int, row: Row, result: step_pb2.StepResult) -> int:
        read = self.kv[row.table].ravel()[: row.num_computed]
        token = next_token(read, row.sampling.seed, row.sampling.choice, self.geometry.vocab_size)
        row.tokens.append(token)
        if row.sampling.HasField("logprobs"):
            result.logprobs.add(row=index, logprob=-float(token), rank=1)
        return token


def _pairs(data: bytes) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in np.frombuffer(data, "<i4").reshape(-1, 2)]

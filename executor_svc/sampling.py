"""How each row draws: the permanent columns behind rows.py, and the slice of them that one step needs.

Selecting a step's rows also starts the masks of their constraints, so that they are ready when the forward pass is.
Every number arrives resolved (no field means "default"), and is checked here once, at Admit. This file draws nothing.
"""

from dataclasses import dataclass, replace

import numpy as np

from executor_svc import bad_words
from executor_svc.bad_words import BadWords
from executor_svc.constraints import Grammars, PendingMask, RowConstraint
from executor_svc.errors import PlanViolation
from protos.stepwire.wire.v1 import step_pb2

MAX_LOGPROBS = 20
NO_LOGPROBS = -1

PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),  # 0: off
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("logprobs", np.int32),  # NO_LOGPROBS: not asked
        ("prompt_logprobs", np.int32),  # the same
        ("min_tokens", np.int32),
        ("choice", np.uint32),
        ("seed", np.uint64),
        # Something of this row changes logits before the draw: a penalty, a bias, a mask.
        ("adjusts", np.bool_),
        # What may be drawn depends on what was drawn: bad words, a constraint.
        ("mask_changes", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class TokenSets:
    """The parameters of one row that are lists. All ids are within the vocabulary."""

    stop: np.ndarray  # int32: not to be drawn while fewer than min_tokens output tokens exist
    bias_ids: np.ndarray  # int32, each once
    bias_values: np.ndarray  # float32
    allowed: np.ndarray  # int32; empty allows everything
    bad_words: BadWords


@dataclass(frozen=True, slots=True)
class History:
    """One sampled row whose logits are adjusted: what the adjustments look at."""

    index: int  # among the sampled rows of the step
    sets: TokenSets
    prompt: np.ndarray  # int32
    output: np.ndarray  # int32
    mask: PendingMask | None = None  # of the row's constraint

    @property
    def has_changing_mask(self) -> bool:
        """What may be drawn depends on what was drawn."""
        return self.mask is not None or len(self.sets.bad_words) > 0


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one step for which a token is drawn, in ascending row order."""

    rows: np.ndarray  # int32 [S]
    parameters: np.ndarray  # PARAMETERS [S]
    positions: np.ndarray  # int32 [S]: which output token of its sequence this draw makes, from 0
    histories: list[History]


class SamplingTable:
    def __init__(self, num_rows: int, vocab_size: int, grammars: Grammars | None = None):
        """grammars: None is for backends without text; no row can have a constraint then."""
        self._vocab_size = vocab_size
        self._grammars = grammars or Grammars(None, vocab_size)
        self._parameters = np.zeros(num_rows, PARAMETERS)
        self._sets: list[TokenSets | None] = [None] * num_rows
        self._constraints: list[RowConstraint | None] = [None] * num_rows

    def reset(self) -> None:
        self._sets = [None] * len(self._sets)
        self._constraints = [None] * len(self._constraints)

    def num_prompt_logprobs(self, rows: np.ndarray) -> np.ndarray:
        """int32 [R]: how many candidates to report for each prompt token; NO_LOGPROBS: not asked."""
        return self._parameters["prompt_logprobs"][rows]

    def masks_change(self, rows: np.ndarray) -> np.ndarray:
        """bool [R]: the row's next draw cannot be prepared before its last one is known."""
        return self._parameters["mask_changes"][rows]

    def set(self, row: int, message: step_pb2.Sampling) -> None:
        _check_numbers(message, self._vocab_size)
        sets = self._token_sets(message)
        constraint = self._constraint(message)
        masks = len(sets.bias_ids) or len(sets.allowed) or (len(sets.stop) and message.min_tokens)
        mask_changes = len(sets.bad_words) > 0 or constraint is not None
        penalties = message.presence_penalty or message.frequency_penalty or message.repetition_penalty != 1
        self._parameters[row] = (
            message.temperature,
            message.top_p,
            message.min_p,
            message.top_k,
            message.presence_penalty,
            message.frequency_penalty,
            message.repetition_penalty,
            message.logprobs if message.HasField("logprobs") else NO_LOGPROBS,
            message.prompt_logprobs if message.HasField("prompt_logprobs") else NO_LOGPROBS,
            message.min_tokens,
            message.choice,
            message.seed,
            bool(masks or penalties or mask_changes),
            mask_changes,
        )
        self._sets[row] = sets
        self._constraints[row] = constraint

    def select(
        self, rows: np.ndarray, tokens: np.ndarray, num_prompt: np.ndarray, num_known: np.ndarray
    ) -> SamplingBatch:
        """The columns of the sampled rows; tokens, num_prompt and num_known are the row table's own, whole."""
        parameters = self._parameters[rows]
        histories: list[History] = []
        constrained: list[tuple[int, RowConstraint, np.ndarray]] = []
        for index in np.flatnonzero(parameters["adjusts"]).tolist():
            row = int(rows[index])
            prompt_end, end = int(num_prompt[row]), int(num_known[row])
            sets = self._sets[row]
            assert sets is not None
            history = History(index, sets, tokens[row, :prompt_end], tokens[row, prompt_end:end])
            constraint = self._constraints[row]
            if constraint is not None:
                constrained.append((len(histories), constraint, history.output.copy()))
            histories.append(history)
        if constrained:
            masks = self._grammars.masks([(constraint, output) for _, constraint, output in constrained])
            for (place, _, _), mask in zip(constrained, masks, strict=True):
                histories[place] = replace(histories[place], mask=mask)
        return SamplingBatch(rows, parameters, num_known[rows] - num_prompt[rows], histories)

    def _token_sets(self, message: step_pb2.Sampling) -> TokenSets:
        bias_ids = self._ids(message.bias_token_ids, "bias_token_ids")
        if len(message.bias_values) != len(message.bias_token_ids):
            raise PlanViolation("sampling: bias_values and bias_token_ids differ in length")
        bias_values = np.frombuffer(message.bias_values, "<f4")
        if not np.isfinite(bias_values).all():
            raise PlanViolation("sampling: a bias is not finite")
        if len(np.unique(bias_ids)) != len(bias_ids):
            raise PlanViolation("sampling: a token has two biases")
        return TokenSets(
            stop=self._ids(message.stop_token_ids, "stop_token_ids"),
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed=self._ids(message.allowed_token_ids, "allowed_token_ids"),
            bad_words=bad_words.parse(message.bad_words, self._vocab_size),
        )

    def _constraint(self, message: step_pb2.Sampling) -> RowConstraint | None:
        if not message.HasField("constraint"):
            return None
        end_ids = self._ids(message.constraint.end_token_ids, "constraint.end_token_ids")
        if not len(end_ids):
            raise PlanViolation("sampling.constraint: no token ends the output")
        return self._grammars.begin(message.constraint.grammar, end_ids)

    def _ids(self, data: bytes, what: str) -> np.ndarray:
        if len(data) % 4:
            raise PlanViolation(f"sampling.{what}: {len(data)} bytes are not int32s")
        ids = np.frombuffer(data, "<i4")
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise PlanViolation(f"sampling.{what}: {ids.min()}..{ids.max()} is not within 0..{self._vocab_size - 1}")
        return ids


def _check_numbers(message: step_pb2.Sampling, vocab_size: int) -> None:
    # Written so that not-a-number fails each of them.
    checks = (
        ("temperature", message.temperature, 0 <= message.temperature < np.inf),
        ("top_p", message.top_p, 0 < message.top_p <= 1),
        ("top_k", message.top_k, message.top_k <= vocab_size),
        ("min_p", message.min_p, 0 <= message.min_p <= 1),
        ("presence_penalty", message.presence_penalty, abs(message.presence_penalty) < np.inf),
        ("frequency_penalty", message.frequency_penalty, abs(message.frequency_penalty) < np.inf),
        ("repetition_penalty", message.repetition_penalty, 0 < message.repetition_penalty < np.inf),
        ("logprobs", message.logprobs, message.logprobs <= MAX_LOGPROBS),
        ("prompt_logprobs", message.prompt_logprobs, message.prompt_logprobs <= MAX_LOGPROBS),
        ("min_tokens", message.min_tokens, message.min_tokens < 2**31),
    )
    for name, value, holds in checks:
        if not holds:
            raise PlanViolation(f"sampling.{name}: {value} is out of range")

"""Drawing on the device: the columns of a step uploaded at once, the rules of adjusted rows kept in device tables.

A row's rules are written when its sequence is first seen and counted forward as it draws; the host reads nothing back.
What a constraint or bad words permit depends on what was drawn: those masks are made on the host in every step, while
What a constraint or bad words permit depends on what was drawn: such masks are made on the host in every step, while
"""

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.errors import RowFault
from executor_svc.masks import permitted
from executor_svc.sampling import NO_LOGPROBS, History, SamplingBatch
from executor_svc.scoring import Scoring, messages
from kernels.logits import LogitRules, apply_rules, argmax_lse, count_drawn, count_tokens
from kernels.sample import CANDIDATES, sample
from protos.stepwire.wire.v1 import step_pb2

# One row's biases, stop ids and bans together.
MAX_EDITS = 2048
FOREVER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Still on the device (or on its way): for the sampled rows at `index`."""

    index: list[int]
    counts: list[int]
    drawn: torch.Tensor  # float32 [n]
    ranks: torch.Tensor  # int32 [n]
    top_ids: torch.Tensor  # int64 [n, most]
    top_logprobs: torch.Tensor  # float32 [n, most]


def pack_columns(batch: SamplingBatch) -> np.ndarray:
    """One upload, int32: seeds [S] (two words each), (temperature, top_p, min_p) [S, 3] as float bits, then top_k,
    choices and positions [S]; each part begins at a multiple of 16 bytes.
    """
    parameters = batch.parameters
    floats = np.stack([parameters[name] for name in ("temperature", "top_p", "min_p")], axis=1).astype(np.float32)
    parts = [
        np.ascontiguousarray(parameters["seed"]).view(np.int32),
        floats.view(np.int32).ravel(),
        parameters["top_k"],
        np.ascontiguousarray(parameters["choice"]).view(np.int32),
        batch.positions,
    ]
    return np.concatenate([np.pad(part, (0, -len(part) % 4)) for part in parts])


def unpack_columns(flat: torch.Tensor, num_rows: int) -> dict[str, torch.Tensor]:
    """The arguments of `sample`, as views."""
    views, begin = [], 0
    for length in (2 * num_rows, 3 * num_rows, num_rows, num_rows, num_rows):
        views.append(flat[begin : begin + length])
        begin += -(-length // 4) * 4
    seeds, params, top_k, choices, positions = views
    return {
        "seeds": seeds.view(torch.int64),
        "params": params.view(torch.float32).view(num_rows, 3),
        "top_k": top_k,
        "choices": choices,
        "positions": positions,
    }


class DeviceSampler:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self._device = device
        self._vocab_size = vocab_size
        self._scratch = torch.empty((num_rows, CANDIDATES), dtype=torch.float32, device=device)
        self._rules = LogitRules(num_rows, vocab_size, MAX_EDITS, device)
        # Whose rules a device row holds; a row's TokenSets are made anew with each Admit.
        self._holds: dict[int, object] = {}

    def reset(self) -> None:
        self._holds.clear()

    def draw(
        self, logits: torch.Tensor, batch: SamplingBatch
    ) -> tuple[torch.Tensor, DeviceLogprobs | None, list[step_pb2.RowFault]]:
        """(int32 [S] on the device, logprobs of those who asked, rows that could draw nothing); logits float32 [S, V]
        may be changed."""
        asked = np.flatnonzero(batch.parameters["logprobs"] != NO_LOGPROBS).tolist()
        # Indexed by what was uploaded: a list would make the host wait.
        askers = self._upload(np.array(asked, np.int64))
        raw = logits[askers] if asked else None
        faults = self._adjust(logits, batch) if batch.histories else []
        columns = unpack_columns(self._upload(pack_columns(batch)), len(batch.rows))
        tokens = sample(logits, scratch=self._scratch, **columns)
        if batch.histories:
            self._count(batch, tokens)
        if raw is None:
            return tokens, None, faults
        found = device_logprobs(raw, tokens[askers], asked, batch.parameters["logprobs"][asked].tolist())
        return tokens, found, faults

    def _adjust(self, logits: torch.Tensor, batch: SamplingBatch) -> list[step_pb2.RowFault]:
        rows = np.full(len(batch.rows), -1, np.int32)
        for history in batch.histories:
            row = int(batch.rows[history.index])
            rows[history.index] = row
            if self._holds.get(row) is not history.sets:
                self._write_row(row, history, batch.parameters[history.index])
                self._holds[row] = history.sets
        faults = self._write_masks(batch)
        apply_rules(logits, self._upload(rows), self._rules)
        return faults

    def _write_masks(self, batch: SamplingBatch) -> list[step_pb2.RowFault]:
        changing = [history for history in batch.histories if history.has_changing_mask]
        if not changing:
            return []
        faults, words = [], []
        rows = batch.rows[[history.index for history in changing]]
        for history, row in zip(changing, rows.tolist(), strict=True):
            try:
                mask = permitted(history, int(batch.parameters["min_tokens"][history.index]), self._vocab_size)
            except RowFault as fault:
                faults.append(step_pb2.RowFault(row=row, message=str(fault)))
                mask = np.ones(self._vocab_size, bool)
            words.append(mask_words(mask))
        self._rules.allowed[self._upload(rows.astype(np.int64))] = self._upload(np.stack(words))
        return faults

    def _count(self, batch: SamplingBatch, tokens: torch.Tensor) -> None:
        adjusted = [history.index for history in batch.histories]
        rows = self._upload(batch.rows[adjusted].astype(np.int32))
        # A row that drew no number ends the epoch; -1 must not be an address meanwhile.
        drawn = tokens[self._upload(np.array(adjusted, np.int64))]
        count_drawn(self._rules.counts, rows, drawn.clamp_min(0))
        self._rules.num_outputs[rows.long()] += 1

    def _write_row(self, row: int, history: History, parameters: np.void) -> None:
        rules, sets = self._rules, history.sets
        rules.counts[row].zero_()
        count_tokens(rules.counts[row], self._upload(history.prompt), in_prompt=True)
        count_tokens(rules.counts[row], self._upload(history.output), in_prompt=False)
        is_masked = history.has_changing_mask or bool(len(sets.allowed))
        penalties = [parameters["presence"], parameters["frequency"], parameters["repetition"], is_masked]
        rules.penalties[row] = self._upload(np.array(penalties, np.float32))
        if len(sets.allowed):
            rules.allowed[row] = self._upload(allowed_mask(sets.allowed, self._vocab_size))
        # A changing mask has min_tokens in it.
        ids, values, until = edits(history, 0 if history.has_changing_mask else int(parameters["min_tokens"]))
        rules.edit_ids[row, : len(ids)] = self._upload(ids)
        rules.edit_values[row, : len(ids)] = self._upload(values)
        rules.edit_until[row, : len(ids)] = self._upload(until)
        rules.num_edits[row] = len(ids)
        rules.num_outputs[row] = len(history.output)

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return upload(values, self._device)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Without waiting: the pinned copy lives until the device has read it."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def allowed_mask(allowed: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32 [ceil(V / 32)]: id v is bit v % 32 of word v // 32."""
    mask = np.zeros(vocab_size, bool)
    mask[allowed] = True
    return mask_words(mask)


def mask_words(mask: np.ndarray) -> np.ndarray:
    """The same of bool [V]."""
    return np.packbits(np.pad(mask, (0, -len(mask) % 32)), bitorder="little").view(np.int32)


def edits(history: History, min_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(ids, values, until): biases for ever, and the stop ids' bans while fewer than min_tokens tokens exist."""
    sets = history.sets
    barred = sets.stop if min_tokens else sets.stop[:0]
    if len(sets.allowed) and np.isin(sets.allowed, barred).all():
        barred = barred[:0]  # only stop tokens are allowed: what the client allows wins
    barred = np.unique(barred)
    ids = np.concatenate([sets.bias_ids, barred]).astype(np.int32)
    values = np.concatenate([sets.bias_values, np.full(len(barred), -np.inf)]).astype(np.float32)
    until = np.concatenate([np.full(len(sets.bias_ids), FOREVER), np.full(len(barred), min_tokens)]).astype(np.int32)
    return ids, values, until


def device_logprobs(raw: torch.Tensor, tokens: torch.Tensor, index: list[int], counts: list[int]) -> DeviceLogprobs:
    _, _, lse = argmax_lse(raw)
    chosen = raw.gather(1, tokens.long().clamp_min(0)[:, None])
    # topk orders equal values as it likes; a stable sort of few would need all. Ids break ties on the host.
    top, ids = raw.topk(min(max(max(counts), 1), raw.shape[1]), dim=1)
    return DeviceLogprobs(
        index=index,
        counts=counts,
        drawn=chosen[:, 0] - lse,
        ranks=(raw > chosen).sum(1, dtype=torch.int32) + 1,
        top_ids=ids,
        top_logprobs=top - lse[:, None],
    )


def score_messages(found: DeviceLogprobs, scoring: Scoring) -> list[step_pb2.PromptLogprobs]:
    """Of a pass's scored tokens; on the host, once the copies have arrived."""
    ids, logprobs = found.top_ids.numpy(), found.top_logprobs.numpy()
    order = np.lexsort((ids, -logprobs), axis=1)
    ids, logprobs = np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
    return list(messages(scoring, found.drawn.numpy(), found.ranks.numpy(), ids, logprobs))


def logprob_messages(found: DeviceLogprobs, rows: np.ndarray) -> list[step_pb2.RowLogprobs]:
    """On the host, once the copies have arrived."""
    told = []
    for i, (index, count) in enumerate(zip(found.index, found.counts, strict=True)):
        ids, logprobs = found.top_ids[i].numpy(), found.top_logprobs[i].numpy()
        order = np.lexsort((ids, -logprobs))[:count]
        told.append(
            step_pb2.RowLogprobs(
                row=int(rows[index]),
                logprob=float(found.drawn[i]),
                rank=int(found.ranks[i]),
                top_token_ids=ids[order].astype("<i4").tobytes(),
                top_logprobs=logprobs[order].astype("<f4").tobytes(),
            )
        )
    return told

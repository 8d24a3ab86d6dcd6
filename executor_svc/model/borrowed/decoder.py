"""A model of transformers as a decoder: a step's rows as one flattened row, its attention over our pages."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from executor_svc.model.attention import PagedStep
from executor_svc.model.borrowed.interface import CannotBorrow, running

PROBE_TOKENS = 4


@dataclass(frozen=True)
class BorrowedConfig:
    """What a pool and a geometry need to know."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    vocab_size: int


class BorrowedDecoder:
    """Any causal model of transformers that attends through its attention interface."""

    def __init__(self, model: torch.nn.Module, *, architecture: str, vocab_size: int, max_position: int):
        self.model = model
        self.kv_dtype = next(model.parameters()).dtype
        self.description = f"transformers' {architecture}, {str(self.kv_dtype).removeprefix('torch.')}"
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        probe = _Probe(max_position)
        positions = np.arange(min(PROBE_TOKENS, max_position))
        logits = self._run(positions % vocab_size, positions, probe, None)
        if logits.shape[-1] < vocab_size:
            raise CannotBorrow(f"it has {logits.shape[-1]} logits for a vocab_size of {vocab_size}")
        num_kv_heads, head_dim = probe.shape()
        self._layers = {module: index for index, module in enumerate(probe.seen)}
        self.config = BorrowedConfig(architecture, len(self._layers), num_kv_heads, head_dim, max_position, vocab_size)

    @torch.inference_mode()
    def forward(self, batch, kv) -> torch.Tensor:
        """Float32 logits [len(batch.logits_index), vocab_size]."""
        step = _Step(PagedStep(batch, kv, torch.device("cpu")), self._layers)
        logits = self._run(batch.token_ids, batch.positions, step, batch.logits_index)
        return logits[:, : self.config.vocab_size].contiguous()

    def _run(self, token_ids: np.ndarray, positions: np.ndarray, attention: Any, wanted: np.ndarray | None):
        """Float32 logits of the tokens `wanted` (None: all), as many as the model makes."""
        inputs = {"input_ids": _row(token_ids), "position_ids": _row(positions)}
        index = None if wanted is None else _row(wanted)[0]
        if index is not None and self._keeps:
            inputs["logits_to_keep"] = index
        with running(attention), torch.inference_mode():
            logits = self.model(**inputs, use_cache=False, return_dict=True).logits[0]
        return (logits if index is None or self._keeps else logits[index]).float()


class _Step:
    """Attention over the pages of a step."""

    def __init__(self, step: PagedStep, layers: dict[torch.nn.Module, int]):
        self.step, self.layers = step, layers

    def see_mask(self, mask_function: Callable[..., torch.Tensor], window: int | None) -> None:
        """Masks were looked at once, when the model was loaded."""

    def attend(self, module, q, k, v, **how: Any) -> torch.Tensor:
        """As `PagedStep.attend`."""
        return self.step.attend(q, k, v, self.layers[module], **how)


class _Probe:
    """One short forward pass that only looks: which modules attend, with what shapes, under what masks."""

    def __init__(self, max_position: int):
        self.max_position = max_position
        self.seen: dict[torch.nn.Module, tuple[int, int]] = {}

    def see_mask(self, mask_function: Callable[..., torch.Tensor], window: int | None) -> None:
        """Is what transformers means a causal mask, within the window where there is one? Asked around its edges."""
        edges = {0, self.max_position - 1}
        edges |= {min(max(window + i, 0), self.max_position - 1) for i in (-1, 0, 1)} if window is not None else set()
        for query in sorted(edges):
            first = 0 if window is None else max(0, query - window - 1)
            keys = torch.arange(first, query + 2)
            expected = (keys <= query) & (keys > query - window if window is not None else keys >= 0)
            zero = torch.zeros((), dtype=torch.int64)
            found = mask_function(zero, zero, torch.tensor(query), keys)
            if not torch.equal(torch.as_tensor(found).expand(keys.shape), expected):
                raise CannotBorrow("its attention mask is neither causal nor a sliding window")

    def attend(self, module, q, k, v, **how: Any) -> torch.Tensor:
        """Remembers; what it returns has the right shape and no meaning."""
        if module in self.seen:
            raise CannotBorrow("a layer of it attends more than once a step")
        self.seen[module] = (k.shape[1], k.shape[2])
        return q

    def shape(self) -> tuple[int, int]:
        """(key and value heads, head size), the same in every layer."""
        if not self.seen:
            raise CannotBorrow("its layers do not use transformers' attention interface")
        shapes = set(self.seen.values())
        if len(shapes) > 1:
            raise CannotBorrow(f"its layers have keys of several shapes: {sorted(shapes)}")
        return shapes.pop()


def _row(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int64))[None]

"""Paged attention in torch: correct on any device, the reference for the native kernel.

A step is planned once (`PagedStep`), then run per layer. Rows computing one token go through one padded batch,
the others one by one. What lies in a page beyond a row's length is masked before it is used, so pages need no clearing.

Shapes: T tokens, R rows, H query heads, K key/value heads, D head size, N blocks of a row, L positions of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from executor_svc.model.config import ModelConfig


@dataclass
class _Span:
    """Rows attended together: where their queries lie and what they may see."""

    tokens: torch.Tensor  # [R, Q] index of each query in the step
    blocks: torch.Tensor  # [R, N]
    positions: torch.Tensor  # [R, Q] of the queries
    length: int  # positions gathered per row


class PagedAttention:
    """A step of a model that our config describes."""

    def __init__(self, batch, kv, config: ModelConfig, device: torch.device):
        self.config = config
        self.step = PagedStep(batch, kv, device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """One layer of the config's model; as `PagedStep.attend`."""
        config = self.config
        window, cap = config.layers[layer].window, config.attention_softcap
        return self.step.attend(q, k, v, layer, window=window, scale=config.attention_scale, softcap=cap)


class PagedStep:
    """One step's attention over block tables; built from the batch, used by every layer."""

    def __init__(self, batch, kv, device: torch.device):
        self.kv = kv
        self.slots = torch.from_numpy(np.asarray(batch.slot_mapping, dtype=np.int64)).to(device)
        self.spans = _spans(batch, kv.block_size, device)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values [T, K, D], then attend with q [T, H, D]; returns [T, H, D].

        sinks [H]: a score of each head that takes its share of the softmax and gives nothing.
        """
        pages_k, pages_v = self.kv.layers[layer]
        block, offset = self.slots // self.kv.block_size, self.slots % self.kv.block_size
        pages_k[block, :, offset] = k.to(pages_k.dtype)
        pages_v[block, :, offset] = v.to(pages_v.dtype)
        out = torch.empty_like(q)
        for index, span in enumerate(self.spans):
            key = (index, window)
            if key not in self._masks:
                self._masks[key] = _mask(span, window)
            seen = self._masks[key]
            unseen = ~seen.any(1)[:, None, :, None]  # stale pages may hold NaN, and 0 * NaN is NaN
            keys, values = (
                self._gather(pages, span).to(q.dtype).masked_fill(unseen, 0) for pages in (pages_k, pages_v)
            )
            queries = q[span.tokens].transpose(1, 2)
            out[span.tokens] = _attend(queries, keys, values, seen, scale, softcap, sinks).transpose(1, 2)
        return out

    def _gather(self, pages: torch.Tensor, span: _Span) -> torch.Tensor:
        """[R, K, L, D] of the rows' pages."""
        found = pages[span.blocks].transpose(1, 2)
        return found.reshape(found.shape[0], found.shape[1], -1, found.shape[-1])[:, :, : span.length]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if cap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=True)
    group = q.shape[1] // k.shape[1]
    scores = (q.float() @ k.repeat_interleave(group, 1).float().transpose(-1, -2)) * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        extra = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.repeat_interleave(group, 1).float()).to(q.dtype)


def _spans(batch, block_size: int, device: torch.device) -> list[_Span]:
    starts = np.asarray(batch.cu_seqlens[:-1], dtype=np.int64)
    counts = np.diff(np.asarray(batch.cu_seqlens, dtype=np.int64))
    lengths = np.asarray(batch.seq_lens, dtype=np.int64)
    tables = np.maximum(np.asarray(batch.block_tables, dtype=np.int64), 0)
    single = np.flatnonzero(counts == 1)
    groups = [single] if single.size else []
    groups += [np.array([row]) for row in np.flatnonzero(counts > 1)]
    spans = []
    for rows in groups:
        num_queries, length = int(counts[rows[0]]), int(lengths[rows].max())
        steps = np.arange(num_queries)
        num_blocks = -(-length // block_size)
        used = -(-lengths[rows] // block_size)
        blocks = np.where(np.arange(num_blocks) < used[:, None], tables[rows, :num_blocks], tables[rows, :1])
        spans.append(
            _Span(
                tokens=torch.from_numpy(starts[rows][:, None] + steps).to(device),
                blocks=torch.from_numpy(blocks).to(device),
                positions=torch.from_numpy((lengths[rows] - num_queries)[:, None] + steps).to(device),
                length=length,
            )
        )
    return spans


def _mask(span: _Span, window: int | None) -> torch.Tensor:
    """[R, Q, L], true where a query sees a position."""
    keys = torch.arange(span.length, device=span.positions.device)
    seen = keys <= span.positions[..., None]
    if window is not None:
        seen &= keys > span.positions[..., None] - window
    return seen

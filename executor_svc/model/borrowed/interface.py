"""Our side of transformers' attention interface: one attention function and one mask function, known by name.

While a step runs, `running` says who answers for its attention. The mask function builds no mask: it describes the one
that transformers would build, a number for "causal" or "causal within a window", and the attention function reads it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from executor_svc.errors import StartupError

NAME = "stepwire"
# Arguments of attention functions that say nothing of what is to be computed here.
SILENT = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    *("target_dtype", "deterministic", "layer_idx", "logits_to_keep", "sliding_window", "output_router_logits"),
}


class CannotBorrow(StartupError):
    """The model asks its attention for something that ours does not do."""


class Attention(Protocol):
    """Who answers for the attention of a step."""

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, K, D] of one layer, sinks [H] -> [T, H, D]."""
        ...

    def see_mask(self, mask_function: Callable[..., torch.Tensor], window: int | None) -> None:
        """A layer will attend causally, within `window` where given; the function says what transformers means."""
        ...


_answers: ContextVar[Attention] = ContextVar("answers")


@contextmanager
def running(attention: Attention) -> Iterator[None]:
    """Within the block, models with our implementation ask `attention`."""
    token = _answers.set(attention)
    try:
        yield
    finally:
        _answers.reset(token)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D of the values]."""
    asked = sorted(name for name, given in more.items() if given is not None and name not in SILENT)
    if asked:
        raise CannotBorrow(f"its attention takes {asked[0]!r}")
    if is_causal is False:
        raise CannotBorrow("its attention is not causal")
    if attention_mask is None or attention_mask.dtype != torch.int64 or attention_mask.numel() != 1:
        raise CannotBorrow("it makes attention masks of its own")
    width = value.shape[-1]
    if width > query.shape[-1] or query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1]:
        raise CannotBorrow(f"its heads do not fit: {[list(part.shape) for part in (query, key, value)]}")
    narrow = query.shape[-1] - width
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    if narrow:
        v = torch.nn.functional.pad(v, (0, narrow))
    out = _answers.get().attend(
        module,
        q,
        k,
        v,
        window=int(attention_mask) or None,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sinks=s_aux,
    )
    return out[..., :width][None], None


def _describe_mask(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, device: Any = None, **_: Any
) -> torch.Tensor:
    """int64 [1, 1, 1, 1]: the window, 0 where there is none."""
    _answers.get().see_mask(mask_function, local_size)
    return torch.full((1, 1, 1, 1), local_size or 0, dtype=torch.int64, device=device)


def register() -> None:
    """Make transformers know our functions; imports it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _describe_mask)

"""Intake: whether a request can be taken at all. Checks, and changes nothing."""

import numpy as np

from scheduler_svc.core.contract import Geometry, Request
from scheduler_svc.core.sequence import worst_case_blocks
from scheduler_svc.errors import InvalidArgument

MAX_CHOICES = 16


def check_request(request: Request) -> None:
    """What holds whatever executor comes."""
    if not len(request.prompt):
        raise InvalidArgument("the prompt has no tokens", field="prompt")
    if not 1 <= request.num_choices <= MAX_CHOICES:
        raise InvalidArgument(f"n is {request.num_choices}, allowed are 1 to {MAX_CHOICES}", field="sampling.n")
    if request.max_tokens < 0:
        raise InvalidArgument(f"max_tokens is {request.max_tokens}, allowed is 0 or more", field="stopping.max_tokens")
    if request.delivered is not None and len(request.delivered) != request.num_choices:
        raise InvalidArgument(f"{len(request.delivered)} resumed choices of {request.num_choices}", field="delivered")


def check_fits(request: Request, geometry: Geometry) -> None:
    """What this executor can do."""
    num_prompt = len(request.prompt)
    if num_prompt >= geometry.max_model_len:
        raise InvalidArgument(
            f"the prompt has {num_prompt} tokens, the context holds {geometry.max_model_len}", field="prompt"
        )
    limit = min(num_prompt + request.max_tokens, geometry.max_model_len)
    blocks = worst_case_blocks(num_prompt, limit, geometry.block_size)
    if blocks > geometry.num_blocks:
        raise InvalidArgument(
            f"prompt and max_tokens need {blocks} blocks of {geometry.block_size} tokens, "
            f"there are {geometry.num_blocks}",
            field="stopping.max_tokens",
        )
    _check_ids(request.prompt, geometry.vocab_size, "prompt")
    for delivered in request.delivered or ():
        _check_ids(delivered.token_ids, geometry.vocab_size, "delivered")
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < geometry.vocab_size:
            raise InvalidArgument(
                f"stop token {token_id}, the vocabulary has {geometry.vocab_size}", field="stopping.stop_token_ids"
            )


def _check_ids(token_ids: np.ndarray, vocab_size: int, field: str) -> None:
    if not len(token_ids):
        return
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise InvalidArgument(f"token {low if low < 0 else high}, the vocabulary has {vocab_size}", field=field)

"""A validated request, resolved: every default filled in, every number in the model's bounds, for the scheduler.

Knows nothing of gRPC or of text beyond stop strings that are special tokens.
"""

import secrets
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.frontend import tenant
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.validation import ModelBounds, Request, check_fits_pool, invalid

# Below this a temperature only overflows; it means greedy.
GREEDY_BELOW = 1e-5
_FIELD_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_MAX_DEADLINE_MS = 2**32 - 1


@dataclass(frozen=True)
class Resolved:
    """What one request will run with, on both sides: `submit` for the scheduler, the rest for the text."""

    submit: session_pb2.Submit
    # As the client knows it; the scheduler's has the tenant in it.
    request_id: str
    prompt: Sequence[int]
    min_tokens: int
    max_tokens: int
    # Ids that end a choice, and which of them stand for a stop string of the request.
    stop_token_ids: frozenset[int]
    stop_string_of_id: dict[int, str]
    stops: tuple[str, ...]
    include_stop: bool
    text: bool
    skip_special_tokens: bool


def resolve(
    request: Request,
    prompt: Sequence[int],
    prompt_field: str,
    *,
    model: ModelFiles,
    bounds: ModelBounds,
    deadline_s: float | None,
    grammar: str | None = None,
    bad_words: Sequence[Sequence[int]] = (),
) -> Resolved:
    """`grammar`: of the request's constraint, checked. `bad_words`: the request's, as ids of the model."""
    max_tokens = _max_tokens(request, len(prompt), bounds)
    check_fits_pool(prompt_field, len(prompt), max_tokens, bounds)
    min_tokens = min(request.stopping.min_tokens, max_tokens)
    stop_ids, stop_string_of_id = _stop_ids(request, model, bounds.vocab_size)
    sampling = _sampling(request, model, bounds.vocab_size)
    sampling.min_tokens = min_tokens
    sampling.stop_token_ids = int32_bytes(sorted(stop_ids))
    sampling.bad_words = int32_bytes(value for word in bad_words for value in (len(word), *word))
    if grammar is not None and max_tokens:
        sampling.constraint.grammar = grammar
        sampling.constraint.end_token_ids = int32_bytes(i for i in model.eos_token_ids if i < bounds.vocab_size)
    num_choices = request.sampling.n if request.sampling.HasField("n") else 1
    if num_choices > 1 and sampling.temperature == 0:
        raise invalid("sampling.n", num_choices, "1 when the temperature is 0 (greedy choices would be equal)")
    request_id = request.request_id or uuid.uuid4().hex
    submit = session_pb2.Submit(
        request_id=tenant.scoped(request_id),
        tenant=tenant.current(),
        num_choices=num_choices,
        prompt_token_ids=int32_bytes(prompt),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        sampling=sampling,
        priority=request.priority,
        cache_salt=request.cache_salt.encode(),
        deadline_ms=deadline_ms(deadline_s),
    )
    response = request.response
    return Resolved(
        submit=submit,
        request_id=request_id,
        prompt=prompt,
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_ids),
        stop_string_of_id=stop_string_of_id,
        stops=tuple(request.stopping.stop),
        include_stop=request.stopping.include_stop,
        text=response.text if response.HasField("text") else True,
        skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
    )


def _max_tokens(request: Request, num_prompt: int, bounds: ModelBounds) -> int:
    room = bounds.max_model_len - num_prompt
    if request.stopping.HasField("max_tokens"):
        return min(request.stopping.max_tokens, room)
    # Nobody asked for a length: what the memory can hold is as good a limit as the context.
    return max(min(room, bounds.num_blocks * bounds.block_size - num_prompt + 1), 1)


def _stop_ids(request: Request, model: ModelFiles, vocab_size: int) -> tuple[set[int], dict[int, str]]:
    stopping = request.stopping
    ids = set(stopping.stop_token_ids)
    if not stopping.ignore_eos:
        ids.update(i for i in model.eos_token_ids if i < vocab_size)
    # A special token has no text of its own to match in, so its spelling as a stop string means its id.
    of_id: dict[int, str] = {}
    for stop in stopping.stop:
        token_id = model.tokenizer.special_tokens.get(stop)
        if token_id is not None and token_id < vocab_size:
            of_id.setdefault(token_id, stop)
    return ids | of_id.keys(), of_id


def _sampling(request: Request, model: ModelFiles, vocab_size: int) -> step_pb2.Sampling:
    asked = request.sampling
    values: dict[str, Any] = {
        name: getattr(asked, name) if asked.HasField(name) else model.sampling_defaults.get(name, default)
        for name, default in _FIELD_DEFAULTS.items()
    }
    values["top_k"] = min(int(values["top_k"]), vocab_size)
    if values["temperature"] < GREEDY_BELOW:
        values["temperature"] = 0.0
    bias = sorted(asked.logit_bias.items())
    return step_pb2.Sampling(
        **values,
        seed=asked.seed if asked.HasField("seed") else secrets.randbits(64),
        bias_token_ids=int32_bytes(token_id for token_id, _ in bias),
        bias_values=np.array([value for _, value in bias], "<f4").tobytes(),
        allowed_token_ids=int32_bytes(sorted(set(asked.allowed_token_ids))),
        logprobs=request.response.logprobs if request.response.HasField("logprobs") else None,
        prompt_logprobs=request.response.prompt_logprobs if request.response.HasField("prompt_logprobs") else None,
    )


def bad_word_ids(words: Iterable[str], encode: Callable[[str], Sequence[int]], vocab_size: int) -> list[list[int]]:
    """The token sequences that bad words stand for, by vLLM's rule: each word without the white space before it, and
    with one space before it where that makes another first token and as many tokens.

    `encode` adds no special tokens. A sequence with an id that the model lacks cannot be drawn, and is left out.
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip() or word
        plain = list(encode(bare))
        spaced = list(encode(" " + bare))
        found.append(plain)
        if plain and spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return [ids for ids in found if ids and max(ids) < vocab_size]


def deadline_ms(left_s: float | None) -> int:
    """0 is no deadline; a deadline in the past is the shortest one."""
    if left_s is None or left_s * 1000 > _MAX_DEADLINE_MS:
        return 0
    return max(1, int(left_s * 1000))


def int32_bytes(ids: Iterable[int]) -> bytes:
    return np.fromiter(ids, "<i4").tobytes()


def bounds_of(welcome: session_pb2.Welcome, max_token_bytes: int) -> ModelBounds:
    geometry = welcome.geometry
    return ModelBounds(
        vocab_size=geometry.vocab_size,
        max_model_len=geometry.max_model_len,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        max_token_bytes=max_token_bytes,
    )

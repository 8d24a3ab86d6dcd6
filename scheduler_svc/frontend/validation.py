"""Every bound of the public API. Each check costs no more than the field it looks at, and names path, value and range.

Two passes: `check_*` needs nothing but the request; the bounds that depend on the served model (ids, lengths) take a
`ModelBounds`. Whether a constraint compiles is for grammar.py to say. Knows nothing of gRPC statuses.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import InvalidArgument

MAX_CHOICES = 16
MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_STOP_IDS = 64
MAX_BIASES, MAX_BIAS = 1024, 100.0
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 128
MAX_ID_BYTES = 256
MAX_SALT_BYTES = 256
MAX_MESSAGES = 4096
MAX_ROLE_BYTES = 64
MAX_TOOLS_BYTES = 1 << 20
MAX_KWARGS_BYTES, MAX_KWARGS = 16 << 10, 64
MAX_CONSTRAINT_BYTES = 1 << 20
MAX_CHOICE_STRINGS = 1024
# Tokenize may be asked for texts longer than the model takes, up to here.
MAX_TOKENIZE_BYTES = 1 << 20

Request = pb.GenerateRequest | pb.ChatRequest


@dataclass(frozen=True)
class ModelBounds:
    """What the served model allows: the model's vocabulary, which may be larger than the tokenizer's."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_token_bytes: int

    @property
    def max_text_bytes(self) -> int:
        """A longer text cannot fit the context, whatever its tokens."""
        return self.max_model_len * self.max_token_bytes


def invalid(field: str, value: object, allowed: str) -> InvalidArgument:
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return InvalidArgument(f"{field} is {shown}, but must be {allowed}", field=field)


# ---- without the model ----


def check_request(request: Request) -> None:
    check_request_id(request.request_id)
    if request.HasField("priority"):
        _within("priority", request.priority, -100, 100)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"{len(request.cache_salt.encode())} bytes", f"at most {MAX_SALT_BYTES} bytes")
    check_sampling(request.sampling)
    check_stopping(request.stopping)
    check_response(request.response)


def check_request_id(request_id: str) -> None:
    if len(request_id.encode()) > MAX_ID_BYTES:
        raise invalid("request_id", f"{len(request_id.encode())} bytes", f"at most {MAX_ID_BYTES} bytes")
    if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in request_id):
        raise InvalidArgument("request_id contains a control character; printable text is allowed", field="request_id")


def check_sampling(sampling: pb.SamplingParams) -> None:
    for name, low, high, open_low in (
        ("temperature", 0, 2, False),
        ("top_p", 0, 1, True),
        ("min_p", 0, 1, False),
        ("presence_penalty", -2, 2, False),
        ("frequency_penalty", -2, 2, False),
        ("repetition_penalty", 0, 10, True),
    ):
        if sampling.HasField(name):
            _real(f"sampling.{name}", getattr(sampling, name), low, high, open_low=open_low)
    if sampling.HasField("n"):
        _within("sampling.n", sampling.n, 1, MAX_CHOICES)
    _at_most("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES, "entries")
    for token_id, bias in sampling.logit_bias.items():
        _real(f"sampling.logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    _at_most("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS, "strings")
    _strings("sampling.bad_words", sampling.bad_words)
    _check_constraint(sampling)


def _check_constraint(sampling: pb.SamplingParams) -> None:
    kind = sampling.WhichOneof("constraint")
    if kind in ("json_schema", "regex", "grammar"):
        size = len(getattr(sampling, kind).encode())
        _within(f"sampling.{kind}", size, 1, MAX_CONSTRAINT_BYTES, unit="bytes")
    elif kind == "choice":
        field, choices = "sampling.choice.choices", sampling.choice.choices
        _within(field, len(choices), 1, MAX_CHOICE_STRINGS, unit="strings")
        _at_most(field, sum(len(choice.encode()) for choice in choices), MAX_CONSTRAINT_BYTES, "bytes")
        for i, choice in enumerate(choices):
            if not choice:
                raise invalid(f"{field}[{i}]", "empty", "at least one character")


def check_stopping(stopping: pb.StoppingCriteria) -> None:
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise invalid(
            "stopping.min_tokens", stopping.min_tokens, f"at most stopping.max_tokens ({stopping.max_tokens})"
        )
    _at_most("stopping.stop", len(stopping.stop), MAX_STOPS, "strings")
    _strings("stopping.stop", stopping.stop)
    _at_most("stopping.stop_token_ids", len(stopping.stop_token_ids), MAX_STOP_IDS, "ids")


def check_response(response: pb.ResponseOptions) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        if response.HasField(name):
            _within(f"response.{name}", getattr(response, name), 0, MAX_LOGPROBS)


def is_constrained(sampling: pb.SamplingParams) -> bool:
    kind = sampling.WhichOneof("constraint")
    return kind is not None and not (kind == "json_object" and not sampling.json_object)


# ---- with the model ----


def check_against_model(request: Request, bounds: ModelBounds) -> None:
    sampling, vocab = request.sampling, bounds.vocab_size
    if sampling.HasField("top_k"):
        _within("sampling.top_k", sampling.top_k, 0, vocab)
    if sampling.logit_bias:
        check_ids("sampling.logit_bias", list(sampling.logit_bias), vocab)
    _at_most("sampling.allowed_token_ids", len(sampling.allowed_token_ids), vocab, "ids")
    check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab)
    check_ids("stopping.stop_token_ids", request.stopping.stop_token_ids, vocab)
    if not request.stopping.HasField("max_tokens"):
        _within("stopping.min_tokens", request.stopping.min_tokens, 0, bounds.max_model_len)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """The one check for token ids, on every entrance: a number from outside never becomes an index unchecked."""
    if len(ids) and max(ids) >= vocab_size:
        at = next(i for i, token_id in enumerate(ids) if token_id >= vocab_size)
        raise invalid(f"{field}[{at}]", ids[at], f"below the vocabulary size, {vocab_size}")


def check_text_size(field: str, num_bytes: int, limit: int) -> None:
    _at_most(field, num_bytes, limit, "bytes; more cannot fit the context")


def check_prompt_ids(ids: Sequence[int], bounds: ModelBounds) -> None:
    """Ids from outside: the length first, which costs nothing."""
    check_prompt_length("token_ids.ids", len(ids), bounds)
    check_ids("token_ids.ids", ids, bounds.vocab_size)


def check_prompt_length(field: str, num_tokens: int, bounds: ModelBounds) -> None:
    if num_tokens == 0:
        raise invalid(field, "an empty prompt", "at least one token")
    if num_tokens >= bounds.max_model_len:
        raise invalid(field, f"{num_tokens} tokens", f"below the context length, {bounds.max_model_len} tokens")


def check_fits_pool(field: str, num_prompt: int, max_tokens: int, bounds: ModelBounds) -> None:
    """The last token's key is never stored, hence the minus one."""
    room = bounds.num_blocks * bounds.block_size
    needed = num_prompt + max(max_tokens, 1) - 1
    if needed > room:
        raise InvalidArgument(
            f"{field} and its output may come to {needed} tokens, but the server has memory for {room}: "
            "send less of it or lower stopping.max_tokens",
            field=field,
        )


# ---- chat ----


def check_messages(request: pb.ChatRequest) -> None:
    if not request.messages:
        raise invalid("messages", "empty", "at least one message")
    _at_most("messages", len(request.messages), MAX_MESSAGES, "messages")
    for i, message in enumerate(request.messages):
        size = len(message.role.encode())
        if not 1 <= size <= MAX_ROLE_BYTES:
            raise invalid(f"messages[{i}].role", f"{size} bytes", f"1..{MAX_ROLE_BYTES} bytes")


def chat_bytes(request: pb.ChatRequest) -> int:
    return sum(len(message.content.encode()) for message in request.messages) + len(request.tools_json.encode())


def parse_tools(text: str) -> list[Any] | None:
    if not text:
        return None
    tools = _parse_json("tools_json", text, MAX_TOOLS_BYTES)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidArgument("tools_json must be a JSON array of objects", field="tools_json")
    return tools


def parse_template_kwargs(text: str, allowed: Iterable[str]) -> dict[str, Any]:
    """By allow-list: only names that the template reads, only scalars."""
    if not text:
        return {}
    field = "template_kwargs_json"
    values = _parse_json(field, text, MAX_KWARGS_BYTES)
    if not isinstance(values, dict):
        raise InvalidArgument(f"{field} must be a JSON object", field=field)
    _at_most(field, len(values), MAX_KWARGS, "names")
    allowed = frozenset(allowed)
    for name, value in values.items():
        if name not in allowed:
            known = ", ".join(sorted(allowed)) or "none"
            raise InvalidArgument(
                f"{field}: not a name that this model's template takes; it takes: {known}", field=field
            )
        if value is not None and not isinstance(value, str | int | float):
            raise InvalidArgument(
                f"{field}.{name} must be a string, a number, a boolean or null", field=f"{field}.{name}"
            )
    return values


def _parse_json(field: str, text: str, max_bytes: int) -> Any:
    _at_most(field, len(text.encode()), max_bytes, "bytes")
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(
            value, ensure_ascii=False, allow_nan=False
        ).encode()  # lone surrogates and endless numbers are no text
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{field} is not valid JSON", field=field) from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(name)


# ---- the shapes of bounds ----


def _within(field: str, value: int, low: int, high: int, *, unit: str = "") -> None:
    if not low <= value <= high:
        raise invalid(field, f"{value} {unit}".strip(), f"within {low}..{high} {unit}".strip())


def _real(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    allowed = f"within {'(' if open_low else '['}{low:g}, {high:g}]"
    if not math.isfinite(value):
        raise invalid(field, value, f"a finite number {allowed}")
    if not low <= value <= high or (open_low and value <= low):
        raise invalid(field, value, allowed)


def _at_most(field: str, count: int, limit: int, unit: str) -> None:
    if count > limit:
        raise invalid(field, f"{count} {unit.split(';')[0]}", f"at most {limit} {unit}")


def _strings(field: str, values: Sequence[str]) -> None:
    for i, value in enumerate(values):
        size = len(value.encode())
        if not 1 <= size <= MAX_STOP_BYTES:
            raise invalid(f"{field}[{i}]", f"{size} bytes", f"1..{MAX_STOP_BYTES} bytes")

"""Messages of vllm.grpc.engine.VllmEngine to ours and back. Pure: no service, no socket.

Zero means "not set" in this interface wherever a field has no presence; what is not set takes the model's default.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as engine

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.frontend.adapters.fields import FieldNames, not_negative, unsupported

FIELDS = FieldNames(
    {
        "sampling": "sampling_params",
        "stopping": "sampling_params",
        "stopping.include_stop": "sampling_params.include_stop_str_in_output",
        "response": "sampling_params",
        "token_ids.ids": "tokenized.input_ids",
        "prompt": "tokenized",
    }
)
_REFUSED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
_UNSET_AT_ZERO = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n")
_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "abort",
}


def to_request(request: Any) -> pb.GenerateRequest:
    """Raises RequestError for what this server has no counterpart of."""
    for name in _REFUSED:
        if request.HasField(name):
            raise unsupported(name)
    if request.extra_mm_inputs:
        raise unsupported("extra_mm_inputs")
    if request.data_parallel_rank:
        raise InvalidArgument(
            f"data_parallel_rank is {request.data_parallel_rank}, but must be 0: there is one rank",
            field="data_parallel_rank",
        )
    params = request.sampling_params
    ours = pb.GenerateRequest(
        request_id=request.request_id,
        sampling=_sampling(params),
        stopping=_stopping(params),
        response=pb.ResponseOptions(text=False, skip_special_tokens=params.skip_special_tokens),
    )
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            setattr(ours.response, name, not_negative(f"sampling_params.{name}", getattr(params, name)))
    match request.WhichOneof("input"):
        case "tokenized":
            ours.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            ours.text = request.text
    return ours


def _sampling(params: Any) -> pb.SamplingParams:
    sampling = pb.SamplingParams()
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    for name in _UNSET_AT_ZERO:
        if value := getattr(params, name):
            setattr(sampling, name, value)
    if params.HasField("seed"):
        sampling.seed = params.seed & (2**64 - 1)
    for token_id, bias in params.logit_bias.items():
        sampling.logit_bias[not_negative("sampling_params.logit_bias", token_id)] = bias
    match params.WhichOneof("constraint"):
        case "structural_tag":
            raise unsupported("sampling_params.structural_tag")
        case "choice":
            sampling.choice.choices.extend(params.choice.choices)
        case str() as kind:
            setattr(sampling, kind, getattr(params, kind))
    return sampling


def _stopping(params: Any) -> pb.StoppingCriteria:
    if params.HasField("truncate_prompt_tokens"):
        raise unsupported("sampling_params.truncate_prompt_tokens")
    stopping = pb.StoppingCriteria(
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
    )
    if params.HasField("max_tokens"):
        stopping.max_tokens = params.max_tokens
    if params.min_tokens:
        stopping.min_tokens = params.min_tokens
    return stopping


class Answer:
    """Our messages of one request, as this interface wants them.

    Streaming: chunks with new ids, then an end for each choice. Not streaming: the end alone, with all ids.
    """

    def __init__(self, request: Any):
        self._streams = request.stream
        self._stop_ids = frozenset(request.sampling_params.stop_token_ids)
        self._wants_logprobs = request.sampling_params.HasField("logprobs")
        self._prompt = pb.PromptInfo()
        self._input_logprobs: Any = None
        self._choices: dict[int, _Choice] = {}

    def messages(self, message: pb.GenerateResponse) -> Iterator[Any]:
        if message.HasField("prompt"):
            self._prompt = message.prompt
            if message.prompt.logprobs:
                self._input_logprobs = _input_logprobs(message.prompt.logprobs)
        choice = self._choices.get(message.index)
        if choice is None:
            choice = self._choices[message.index] = _Choice()
        choice.num_tokens += len(message.token_ids)
        if not self._streams:
            choice.token_ids.extend(message.token_ids)
            choice.logprobs.extend(message.logprobs)
        elif message.token_ids:
            yield engine.GenerateResponse(chunk=self._chunk(message, choice))
        if message.finish_reason:
            yield engine.GenerateResponse(complete=self._complete(message, choice))

    def _chunk(self, message: pb.GenerateResponse, choice: "_Choice") -> Any:
        input_logprobs, self._input_logprobs = self._input_logprobs, None
        return engine.GenerateStreamChunk(
            index=message.index,
            token_ids=message.token_ids,
            prompt_tokens=self._prompt.num_tokens,
            completion_tokens=choice.num_tokens,
            cached_tokens=self._prompt.num_cached_tokens,
            output_logprobs=self._output_logprobs(message.logprobs),
            input_logprobs=input_logprobs,
        )

    def _complete(self, message: pb.GenerateResponse, choice: "_Choice") -> Any:
        usage = message.usage
        complete = engine.GenerateComplete(
            index=message.index,
            output_ids=choice.token_ids,
            finish_reason=_REASONS[message.finish_reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=self._output_logprobs(choice.logprobs) if choice.logprobs else None,
            input_logprobs=self._input_logprobs,
        )
        if message.WhichOneof("stop_match") == "stop_string":
            complete.matched_stop_str = message.stop_string
        elif message.stop_token_id in self._stop_ids and message.HasField("stop_token_id"):
            complete.matched_token_id = message.stop_token_id
        return complete

    def _output_logprobs(self, logprobs: Sequence[pb.TokenLogprob]) -> Any:
        if not self._wants_logprobs:
            return None
        return engine.OutputLogProbs(
            token_logprobs=[entry.logprob for entry in logprobs],
            token_ids=[entry.token_id for entry in logprobs],
            top_logprobs=[_top(entry) for entry in logprobs],
        )


class _Choice:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: list[pb.TokenLogprob] = []


def _top(entry: pb.TokenLogprob) -> Any:
    return engine.TopLogProbs(
        values=[candidate.logprob for candidate in entry.top], token_ids=[candidate.token_id for candidate in entry.top]
    )


def _input_logprobs(logprobs: Sequence[pb.TokenLogprob]) -> Any:
    return engine.InputLogProbs(
        token_logprobs=[engine.InputTokenLogProb(value=entry.logprob) for entry in logprobs],
        token_ids=[entry.token_id for entry in logprobs],
        top_logprobs=[_top(entry) for entry in logprobs],
    )

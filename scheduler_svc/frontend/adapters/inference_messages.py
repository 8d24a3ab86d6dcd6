"""Messages of vllm.Inference to ours and back. Pure: no service, no socket."""

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.vllm import inference_pb2 as vllm
from scheduler_svc.frontend.adapters.fields import FieldNames, unsupported

# This interface's own default, which its clients count on.
DEFAULT_MAX_TOKENS = 20
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_OUR_CONSTRAINT = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "json_object": "json_object"}
FIELDS = FieldNames(
    {
        "sampling.temperature": "temperature",
        "sampling.n": "sampling.num_sequences",
        **{f"sampling.{name}": f"decoding.{name}" for name in (*_PENALTIES, "logit_bias", "allowed_token_ids")},
        **{f"sampling.{ours}": f"decoding.{theirs}" for theirs, ours in _OUR_CONSTRAINT.items()},
        "sampling.choice": "decoding.choice",
        "stopping.max_tokens": "stopping.max_new_tokens",
        "stopping.min_tokens": "stopping.min_new_tokens",
        "stopping.stop": "stopping.stop_strings",
        "stopping.include_stop": "stopping.include_stop_strings",
        "response.text": "response.output_text",
        "response.logprobs": "response.output_candidates",
        "response.prompt_logprobs": "response.prompt_candidates",
        "cache_salt": "kv.cache_salt",
    }
)
_REASONS = {
    pb.FINISH_REASON_STOP: vllm.FinishInfo.STOP,
    pb.FINISH_REASON_LENGTH: vllm.FinishInfo.LENGTH,
    pb.FINISH_REASON_CANCELLED: vllm.FinishInfo.ABORTED,
}


def to_request(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Raises RequestError for what this server has no counterpart of."""
    _refuse(request)
    response, stopping = request.response, request.stopping
    ours = pb.GenerateRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=_sampling(request),
        stopping=pb.StoppingCriteria(
            max_tokens=stopping.max_new_tokens or DEFAULT_MAX_TOKENS,
            min_tokens=stopping.min_new_tokens or None,
            stop=stopping.stop_strings,
            stop_token_ids=stopping.stop_token_ids,
            include_stop=stopping.include_stop_strings,
            ignore_eos=stopping.ignore_eos,
        ),
        response=pb.ResponseOptions(
            text=response.output_text if response.HasField("output_text") else True,
            skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
        ),
        priority=request.priority or None,
        cache_salt=request.kv.cache_salt,
    )
    if response.output_logprobs or response.HasField("output_candidates"):
        ours.response.logprobs = response.output_candidates.top_n
    if response.prompt_logprobs or response.HasField("prompt_candidates"):
        ours.response.prompt_logprobs = response.prompt_candidates.top_n
    match request.WhichOneof("prompt"):
        case "token_ids":
            ours.token_ids.ids.extend(request.token_ids.ids)
        case "text":
            ours.text = request.text
    return ours


def _refuse(request: vllm.GenerateRequest) -> None:
    response = request.response
    refused = {
        "truncate_prompt_tokens": bool(request.truncate_prompt_tokens),
        "media": bool(request.media),
        "lora_name": bool(request.lora_name),
        "kv.bypass_prefix_cache": request.kv.bypass_prefix_cache,
        "kv.kv_transfer_params": request.kv.HasField("kv_transfer_params"),
        "kv.ec_transfer_params": request.kv.HasField("ec_transfer_params"),
        "decoding.structural_tag": request.decoding.HasField("structural_tag"),
        # The frontend knows the ids of a text only while it encodes it.
        "response.prompt_token_ids": response.prompt_token_ids and request.WhichOneof("prompt") == "text",
    }
    for name in ("output_candidates", "prompt_candidates"):
        kind = getattr(response, name).WhichOneof("select")
        refused[f"response.{name}.{kind}"] = kind in ("token_ids", "all")
    for field, is_set in refused.items():
        if is_set:
            raise unsupported(field)


def _sampling(request: vllm.GenerateRequest) -> pb.SamplingParams:
    drawn, decoding = request.sampling, request.decoding
    sampling = pb.SamplingParams(
        temperature=request.temperature if request.HasField("temperature") else None,
        top_k=drawn.top_k or None,
        top_p=drawn.top_p or None,
        min_p=drawn.min_p or None,
        n=drawn.num_sequences or None,
        seed=drawn.seed & (2**64 - 1) if drawn.HasField("seed") else None,
        logit_bias=decoding.logit_bias,
        allowed_token_ids=decoding.allowed_token_ids,
    )
    for name in _PENALTIES:
        if value := getattr(decoding, name):
            setattr(sampling, name, value)
    match decoding.WhichOneof("structured_output"):
        case "choice":
            sampling.choice.choices.extend(decoding.choice.choices)
        case str() as kind:
            setattr(sampling, _OUR_CONSTRAINT[kind], getattr(decoding, kind))
    return sampling


class Answer:
    """Our messages of one request, as this interface wants them."""

    def __init__(self, request: vllm.GenerateRequest, eos_token_ids: tuple[int, ...]):
        self._request = request
        # What ended a choice is an end of sequence unless the request asked for that id.
        self._eos = frozenset(eos_token_ids) - set(request.stopping.stop_token_ids)

    def message(self, ours: pb.GenerateResponse) -> vllm.GenerateResponse:
        response = self._request.response
        output = vllm.SequenceOutput(
            index=ours.index,
            text=ours.text,
            num_tokens=len(ours.token_ids),
            token_ids=ours.token_ids if response.output_token_ids else (),
        )
        for entry in ours.logprobs:
            if response.output_logprobs:
                output.logprobs.append(entry.logprob)
                output.ranks.append(entry.rank)
            if response.HasField("output_candidates"):
                output.candidate_tokens.append(_candidates(entry))
        if ours.finish_reason:
            output.finish_info.CopyFrom(self._finish_info(ours))
        theirs = vllm.GenerateResponse(outputs=output)
        if ours.HasField("prompt"):
            theirs.prompt_info.CopyFrom(self._prompt_info(ours.prompt))
        return theirs

    def _prompt_info(self, prompt: pb.PromptInfo) -> vllm.PromptInfo:
        response = self._request.response
        info = vllm.PromptInfo(
            num_prompt_tokens=prompt.num_tokens,
            token_ids=self._request.token_ids.ids if response.prompt_token_ids else (),
        )
        for entry in prompt.logprobs:
            if response.prompt_logprobs:
                info.logprobs.append(entry.logprob)
                info.ranks.append(entry.rank)
            if response.HasField("prompt_candidates"):
                info.candidate_tokens.append(_candidates(entry))
        return info

    def _finish_info(self, ours: pb.GenerateResponse) -> vllm.FinishInfo:
        info = vllm.FinishInfo(
            num_output_tokens=ours.usage.completion_tokens,
            finish_reason=_REASONS[ours.finish_reason],
        )
        match ours.WhichOneof("stop_match"):
            case "stop_string":
                info.stop_string = ours.stop_string
            case "stop_token_id" if ours.stop_token_id in self._eos:
                info.eos_token_id = ours.stop_token_id
            case "stop_token_id":
                info.stop_token_id = ours.stop_token_id
        return info


def _candidates(entry: pb.TokenLogprob) -> vllm.CandidateTokenInfo:
    """Without the token itself, which the answer has anyway."""
    return vllm.CandidateTokenInfo(
        tokens=[
            vllm.CandidateTokenInfo.TokenInfo(id=candidate.token_id, logprob=candidate.logprob, rank=rank)
            for rank, candidate in enumerate(entry.top, 1)
            if candidate.token_id != entry.token_id
        ]
    )

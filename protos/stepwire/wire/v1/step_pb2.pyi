from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_PLAN_REFUSED: _ClassVar[FaultKind]
    FAULT_KIND_NOT_FINITE: _ClassVar[FaultKind]
    FAULT_KIND_COMPUTE: _ClassVar[FaultKind]
    FAULT_KIND_CRASH: _ClassVar[FaultKind]
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_PLAN_REFUSED: FaultKind
FAULT_KIND_NOT_FINITE: FaultKind
FAULT_KIND_COMPUTE: FaultKind
FAULT_KIND_CRASH: FaultKind

class ToExecutor(_message.Message):
    __slots__ = ("start_epoch", "plan", "beat", "refusal")
    START_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    start_epoch: StartEpoch
    plan: StepPlan
    beat: Beat
    refusal: Refusal
    def __init__(self, start_epoch: _Optional[_Union[StartEpoch, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class FromExecutor(_message.Message):
    __slots__ = ("hello", "result", "beat", "fault")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    hello: ExecutorHello
    result: StepResult
    beat: Beat
    fault: Fault
    def __init__(self, hello: _Optional[_Union[ExecutorHello, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class ExecutorHello(_message.Message):
    __slots__ = ("protocol_version", "oldest_protocol_version", "instance_id", "geometry", "model", "device", "backend", "boot_id", "epoch")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    oldest_protocol_version: int
    instance_id: int
    geometry: Geometry
    model: ModelIdentity
    device: str
    backend: str
    boot_id: int
    epoch: int
    def __init__(self, protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., instance_id: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., device: _Optional[str] = ..., backend: _Optional[str] = ..., boot_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens", "vocab_size")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("architecture", "dtype", "kv_dtype", "fingerprint")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    dtype: str
    kv_dtype: str
    fingerprint: str
    def __init__(self, architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class StartEpoch(_message.Message):
    __slots__ = ("boot_id", "epoch")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    epoch: int
    def __init__(self, boot_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "fatal")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    fatal: bool
    def __init__(self, reason: _Optional[str] = ..., fatal: _Optional[bool] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("instance_id", "step_id", "busy_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    BUSY_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    step_id: int
    busy_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., step_id: _Optional[int] = ..., busy_ms: _Optional[int] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("boot_id", "epoch", "step_id", "message", "kind")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    epoch: int
    step_id: int
    message: str
    kind: FaultKind
    def __init__(self, boot_id: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., message: _Optional[str] = ..., kind: _Optional[_Union[FaultKind, str]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("boot_id", "epoch", "step_id", "release", "admit", "copy", "grow", "prefill")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    GROW_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    epoch: int
    step_id: int
    release: bytes
    admit: _containers.RepeatedCompositeFieldContainer[Admit]
    copy: bytes
    grow: bytes
    prefill: bytes
    def __init__(self, boot_id: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., release: _Optional[bytes] = ..., admit: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ..., copy: _Optional[bytes] = ..., grow: _Optional[bytes] = ..., prefill: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("row", "token_ids", "num_prompt_tokens", "block_ids", "num_computed_tokens", "sampling", "traceparent")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    row: int
    token_ids: bytes
    num_prompt_tokens: int
    block_ids: bytes
    num_computed_tokens: int
    sampling: Sampling
    traceparent: str
    def __init__(self, row: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., block_ids: _Optional[bytes] = ..., num_computed_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "choice", "min_tokens", "stop_token_ids", "bias_token_ids", "bias_values", "allowed_token_ids", "logprobs", "bad_words", "prompt_logprobs", "constraint")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    choice: int
    min_tokens: int
    stop_token_ids: bytes
    bias_token_ids: bytes
    bias_values: bytes
    allowed_token_ids: bytes
    logprobs: int
    bad_words: bytes
    prompt_logprobs: int
    constraint: Constraint
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ..., bias_token_ids: _Optional[bytes] = ..., bias_values: _Optional[bytes] = ..., allowed_token_ids: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., bad_words: _Optional[bytes] = ..., prompt_logprobs: _Optional[int] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("grammar", "end_token_ids")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    end_token_ids: bytes
    def __init__(self, grammar: _Optional[str] = ..., end_token_ids: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("boot_id", "epoch", "step_id", "token_ids", "logprobs", "forward_us", "num_rows", "num_stored_tokens", "prompt_logprobs", "faults")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    epoch: int
    step_id: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    forward_us: int
    num_rows: int
    num_stored_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    faults: _containers.RepeatedCompositeFieldContainer[RowFault]
    def __init__(self, boot_id: _Optional[int] = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., forward_us: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_stored_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[RowFault, _Mapping]]] = ...) -> None: ...

class RowFault(_message.Message):
    __slots__ = ("row", "message")
    ROW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    row: int
    message: str
    def __init__(self, row: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("row", "first_position", "logprobs", "ranks", "num_top", "top_token_ids", "top_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    first_position: int
    logprobs: bytes
    ranks: bytes
    num_top: int
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, row: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "logprob", "rank", "top_token_ids", "top_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprob: float
    rank: int
    top_token_ids: bytes
    top_logprobs: bytes
    def __init__(self, row: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

from protos.stepwire.admin.v1 import admin_pb2 as _admin_pb2
from protos.stepwire.wire.v1 import step_pb2 as _step_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_CAUSE_UNSPECIFIED: _ClassVar[FinishCause]
    FINISH_CAUSE_STOP: _ClassVar[FinishCause]
    FINISH_CAUSE_LENGTH: _ClassVar[FinishCause]
    FINISH_CAUSE_CANCELLED: _ClassVar[FinishCause]
    FINISH_CAUSE_EXPIRED: _ClassVar[FinishCause]
    FINISH_CAUSE_FAILED: _ClassVar[FinishCause]
    FINISH_CAUSE_INVALID: _ClassVar[FinishCause]
FINISH_CAUSE_UNSPECIFIED: FinishCause
FINISH_CAUSE_STOP: FinishCause
FINISH_CAUSE_LENGTH: FinishCause
FINISH_CAUSE_CANCELLED: FinishCause
FINISH_CAUSE_EXPIRED: FinishCause
FINISH_CAUSE_FAILED: FinishCause
FINISH_CAUSE_INVALID: FinishCause

class ToScheduler(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "lease", "load_query", "goodbye", "watch_blocks", "snapshot_query", "story_query")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LOAD_QUERY_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    WATCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_QUERY_FIELD_NUMBER: _ClassVar[int]
    STORY_QUERY_FIELD_NUMBER: _ClassVar[int]
    hello: FrontendHello
    submit: Submit
    cancel: Cancel
    lease: Lease
    load_query: LoadQuery
    goodbye: Goodbye
    watch_blocks: WatchBlocks
    snapshot_query: SnapshotQuery
    story_query: StoryQuery
    def __init__(self, hello: _Optional[_Union[FrontendHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., load_query: _Optional[_Union[LoadQuery, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., watch_blocks: _Optional[_Union[WatchBlocks, _Mapping]] = ..., snapshot_query: _Optional[_Union[SnapshotQuery, _Mapping]] = ..., story_query: _Optional[_Union[StoryQuery, _Mapping]] = ...) -> None: ...

class ToFrontend(_message.Message):
    __slots__ = ("welcome", "tokens", "rejected", "load", "refusal", "block_news", "snapshot", "story")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NEWS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    tokens: TokenFrame
    rejected: Rejected
    load: Load
    refusal: _step_pb2.Refusal
    block_news: BlockNews
    snapshot: SnapshotReply
    story: StoryReply
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., tokens: _Optional[_Union[TokenFrame, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., refusal: _Optional[_Union[_step_pb2.Refusal, _Mapping]] = ..., block_news: _Optional[_Union[BlockNews, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotReply, _Mapping]] = ..., story: _Optional[_Union[StoryReply, _Mapping]] = ...) -> None: ...

class FrontendHello(_message.Message):
    __slots__ = ("protocol_version", "oldest_protocol_version", "instance_id", "fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    oldest_protocol_version: int
    instance_id: int
    fingerprint: str
    def __init__(self, protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., instance_id: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("boot_id", "protocol_version", "lease_ms", "executor_ready", "epoch", "geometry", "model", "device", "backend", "stalled")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    protocol_version: int
    lease_ms: int
    executor_ready: bool
    epoch: int
    geometry: _step_pb2.Geometry
    model: _step_pb2.ModelIdentity
    device: str
    backend: str
    stalled: bool
    def __init__(self, boot_id: _Optional[int] = ..., protocol_version: _Optional[int] = ..., lease_ms: _Optional[int] = ..., executor_ready: _Optional[bool] = ..., epoch: _Optional[int] = ..., geometry: _Optional[_Union[_step_pb2.Geometry, _Mapping]] = ..., model: _Optional[_Union[_step_pb2.ModelIdentity, _Mapping]] = ..., device: _Optional[str] = ..., backend: _Optional[str] = ..., stalled: _Optional[bool] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "handle", "num_choices", "prompt_token_ids", "max_tokens", "min_tokens", "stop_token_ids", "sampling", "priority", "tenant", "cache_salt", "deadline_ms", "delivered", "num_prompt_logprobs", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    handle: int
    num_choices: int
    prompt_token_ids: bytes
    max_tokens: int
    min_tokens: int
    stop_token_ids: bytes
    sampling: _step_pb2.Sampling
    priority: int
    tenant: str
    cache_salt: bytes
    deadline_ms: int
    delivered: _containers.RepeatedCompositeFieldContainer[Delivered]
    num_prompt_logprobs: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., handle: _Optional[int] = ..., num_choices: _Optional[int] = ..., prompt_token_ids: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_step_pb2.Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., delivered: _Optional[_Iterable[_Union[Delivered, _Mapping]]] = ..., num_prompt_logprobs: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("token_ids", "finished", "num_preemptions", "num_resumes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMES_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    finished: bool
    num_preemptions: int
    num_resumes: int
    def __init__(self, token_ids: _Optional[bytes] = ..., finished: _Optional[bool] = ..., num_preemptions: _Optional[int] = ..., num_resumes: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    handle: int
    def __init__(self, request_id: _Optional[str] = ..., handle: _Optional[int] = ...) -> None: ...

class TokenFrame(_message.Message):
    __slots__ = ("handles", "token_ids", "positions", "started", "finished", "logprobs", "prompt_logprobs")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    token_ids: bytes
    positions: bytes
    started: _containers.RepeatedCompositeFieldContainer[Started]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[ChoicePromptLogprobs]
    def __init__(self, handles: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., started: _Optional[_Iterable[_Union[Started, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[ChoicePromptLogprobs, _Mapping]]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("handle", "num_cached_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_cached_tokens: int
    def __init__(self, handle: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "cause", "stop_token_id", "num_output_tokens", "num_cached_tokens", "num_preemptions", "num_resumes", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESUMES_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    cause: FinishCause
    stop_token_id: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_resumes: int
    message: str
    def __init__(self, handle: _Optional[int] = ..., cause: _Optional[_Union[FinishCause, str]] = ..., stop_token_id: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_resumes: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("entry", "values")
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    entry: int
    values: _step_pb2.RowLogprobs
    def __init__(self, entry: _Optional[int] = ..., values: _Optional[_Union[_step_pb2.RowLogprobs, _Mapping]] = ...) -> None: ...

class ChoicePromptLogprobs(_message.Message):
    __slots__ = ("handle", "values")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    values: _step_pb2.PromptLogprobs
    def __init__(self, handle: _Optional[int] = ..., values: _Optional[_Union[_step_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "status", "message", "field", "retry_after_ms")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    status: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, handle: _Optional[int] = ..., status: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class LoadQuery(_message.Message):
    __slots__ = ("query_id",)
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    def __init__(self, query_id: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("query_id", "num_running", "num_waiting", "blocks_total", "blocks_owned", "blocks_cached", "generation_tokens_total", "prompt_tokens_total", "epoch", "executor_ready", "num_frontends", "prompt_tokens_cached_total")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OWNED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_READY_FIELD_NUMBER: _ClassVar[int]
    NUM_FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_owned: int
    blocks_cached: int
    generation_tokens_total: int
    prompt_tokens_total: int
    epoch: int
    executor_ready: bool
    num_frontends: int
    prompt_tokens_cached_total: int
    def __init__(self, query_id: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_owned: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., epoch: _Optional[int] = ..., executor_ready: _Optional[bool] = ..., num_frontends: _Optional[int] = ..., prompt_tokens_cached_total: _Optional[int] = ...) -> None: ...

class WatchBlocks(_message.Message):
    __slots__ = ("tenant", "stop")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    stop: bool
    def __init__(self, tenant: _Optional[str] = ..., stop: _Optional[bool] = ...) -> None: ...

class BlockNews(_message.Message):
    __slots__ = ("tenant", "begins_anew", "block_size", "changes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_ANEW_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    begins_anew: bool
    block_size: int
    changes: _containers.RepeatedCompositeFieldContainer[BlockChange]
    def __init__(self, tenant: _Optional[str] = ..., begins_anew: _Optional[bool] = ..., block_size: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[BlockChange, _Mapping]]] = ...) -> None: ...

class BlockChange(_message.Message):
    __slots__ = ("hashes", "parents", "token_ids")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    parents: bytes
    token_ids: bytes
    def __init__(self, hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class SnapshotQuery(_message.Message):
    __slots__ = ("query_id",)
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    def __init__(self, query_id: _Optional[int] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("query_id", "snapshot")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    snapshot: _admin_pb2.Snapshot
    def __init__(self, query_id: _Optional[int] = ..., snapshot: _Optional[_Union[_admin_pb2.Snapshot, _Mapping]] = ...) -> None: ...

class StoryQuery(_message.Message):
    __slots__ = ("query_id", "request_id")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    request_id: str
    def __init__(self, query_id: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class StoryReply(_message.Message):
    __slots__ = ("query_id", "lines")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    query_id: int
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, query_id: _Optional[int] = ..., lines: _Optional[_Iterable[str]] = ...) -> None: ...

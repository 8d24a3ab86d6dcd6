from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("snapshot", "problem", "model", "num_streams")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    problem: str
    model: str
    num_streams: int
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., problem: _Optional[str] = ..., model: _Optional[str] = ..., num_streams: _Optional[int] = ...) -> None: ...

class GetStoryRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetStoryResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lines: _Optional[_Iterable[str]] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("boot_id", "uptime_ms", "epoch", "executor_ready", "stalled", "draining", "device", "backend", "dtype", "num_running", "num_waiting", "max_num_seqs", "max_num_batched_tokens", "totals", "blocks", "running", "waiting", "shared", "tenants", "frontends", "executors", "time_to_first_token", "inter_token")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_READY_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    FRONTENDS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    boot_id: int
    uptime_ms: int
    epoch: int
    executor_ready: bool
    stalled: bool
    draining: bool
    device: str
    backend: str
    dtype: str
    num_running: int
    num_waiting: int
    max_num_seqs: int
    max_num_batched_tokens: int
    totals: Totals
    blocks: Blocks
    running: Sequences
    waiting: Sequences
    shared: _containers.RepeatedCompositeFieldContainer[SharedPrefix]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    frontends: _containers.RepeatedCompositeFieldContainer[Frontend]
    executors: _containers.RepeatedCompositeFieldContainer[Executor]
    time_to_first_token: Histogram
    inter_token: Histogram
    def __init__(self, boot_id: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., executor_ready: _Optional[bool] = ..., stalled: _Optional[bool] = ..., draining: _Optional[bool] = ..., device: _Optional[str] = ..., backend: _Optional[str] = ..., dtype: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., running: _Optional[_Union[Sequences, _Mapping]] = ..., waiting: _Optional[_Union[Sequences, _Mapping]] = ..., shared: _Optional[_Iterable[_Union[SharedPrefix, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., frontends: _Optional[_Iterable[_Union[Frontend, _Mapping]]] = ..., executors: _Optional[_Iterable[_Union[Executor, _Mapping]]] = ..., time_to_first_token: _Optional[_Union[Histogram, _Mapping]] = ..., inter_token: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("generation_tokens", "prompt_tokens_computed", "prompt_tokens_cached", "preemptions", "recomputed_tokens", "steps", "plan_s", "commit_s", "device_s", "step_s")
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PLAN_S_FIELD_NUMBER: _ClassVar[int]
    COMMIT_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    generation_tokens: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    preemptions: int
    recomputed_tokens: int
    steps: int
    plan_s: float
    commit_s: float
    device_s: float
    step_s: float
    def __init__(self, generation_tokens: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., plan_s: _Optional[float] = ..., commit_s: _Optional[float] = ..., device_s: _Optional[float] = ..., step_s: _Optional[float] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("total", "owned", "cached", "free", "block_size", "cells", "shared")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    total: int
    owned: int
    cached: int
    free: int
    block_size: int
    cells: bytes
    shared: int
    def __init__(self, total: _Optional[int] = ..., owned: _Optional[int] = ..., cached: _Optional[int] = ..., free: _Optional[int] = ..., block_size: _Optional[int] = ..., cells: _Optional[bytes] = ..., shared: _Optional[int] = ...) -> None: ...

class Sequences(_message.Message):
    __slots__ = ("request_ids", "tenants", "rows", "num_prompt_tokens", "num_computed_tokens", "num_output_tokens", "max_tokens", "num_shared_tokens", "num_preemptions", "age_ms")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedScalarFieldContainer[str]
    rows: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_computed_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_shared_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_preemptions: _containers.RepeatedScalarFieldContainer[int]
    age_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[str]] = ..., rows: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[_Iterable[int]] = ..., num_computed_tokens: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[_Iterable[int]] = ..., num_shared_tokens: _Optional[_Iterable[int]] = ..., num_preemptions: _Optional[_Iterable[int]] = ..., age_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedPrefix(_message.Message):
    __slots__ = ("num_sequences", "num_blocks", "request_id", "tenant")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_blocks: int
    request_id: str
    tenant: str
    def __init__(self, num_sequences: _Optional[int] = ..., num_blocks: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "num_running", "num_waiting", "num_blocks", "num_output_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_output_tokens: int
    def __init__(self, name: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class Frontend(_message.Message):
    __slots__ = ("session", "instance_id", "num_sequences", "pending_bytes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PENDING_BYTES_FIELD_NUMBER: _ClassVar[int]
    session: int
    instance_id: int
    num_sequences: int
    pending_bytes: int
    def __init__(self, session: _Optional[int] = ..., instance_id: _Optional[int] = ..., num_sequences: _Optional[int] = ..., pending_bytes: _Optional[int] = ...) -> None: ...

class Executor(_message.Message):
    __slots__ = ("instance_id", "serving", "device", "silent_ms")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    instance_id: int
    serving: bool
    device: str
    silent_ms: int
    def __init__(self, instance_id: _Optional[int] = ..., serving: _Optional[bool] = ..., device: _Optional[str] = ..., silent_ms: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("bounds_s", "counts", "sum_s")
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_S_FIELD_NUMBER: _ClassVar[int]
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_s: float
    def __init__(self, bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sum_s: _Optional[float] = ...) -> None: ...

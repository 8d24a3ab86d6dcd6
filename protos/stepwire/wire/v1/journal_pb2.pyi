from protos.stepwire.wire.v1 import session_pb2 as _session_pb2
from protos.stepwire.wire.v1 import step_pb2 as _step_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalEntry(_message.Message):
    __slots__ = ("now", "start", "submit", "cancel_request", "cancel_handle", "drop_session", "plan", "result", "reset", "executor_lost")
    NOW_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CANCEL_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DROP_SESSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_LOST_FIELD_NUMBER: _ClassVar[int]
    now: float
    start: JournalStart
    submit: JournalSubmit
    cancel_request: str
    cancel_handle: JournalHandle
    drop_session: int
    plan: JournalPlan
    result: _step_pb2.StepResult
    reset: JournalReset
    executor_lost: JournalLost
    def __init__(self, now: _Optional[float] = ..., start: _Optional[_Union[JournalStart, _Mapping]] = ..., submit: _Optional[_Union[JournalSubmit, _Mapping]] = ..., cancel_request: _Optional[str] = ..., cancel_handle: _Optional[_Union[JournalHandle, _Mapping]] = ..., drop_session: _Optional[int] = ..., plan: _Optional[_Union[JournalPlan, _Mapping]] = ..., result: _Optional[_Union[_step_pb2.StepResult, _Mapping]] = ..., reset: _Optional[_Union[JournalReset, _Mapping]] = ..., executor_lost: _Optional[_Union[JournalLost, _Mapping]] = ...) -> None: ...

class JournalStart(_message.Message):
    __slots__ = ("version", "masked", "limits_json", "snapshot")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_JSON_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    version: int
    masked: bool
    limits_json: str
    snapshot: bytes
    def __init__(self, version: _Optional[int] = ..., masked: _Optional[bool] = ..., limits_json: _Optional[str] = ..., snapshot: _Optional[bytes] = ...) -> None: ...

class JournalSubmit(_message.Message):
    __slots__ = ("session", "submit", "deadline")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    session: int
    submit: _session_pb2.Submit
    deadline: float
    def __init__(self, session: _Optional[int] = ..., submit: _Optional[_Union[_session_pb2.Submit, _Mapping]] = ..., deadline: _Optional[float] = ...) -> None: ...

class JournalHandle(_message.Message):
    __slots__ = ("session", "handle")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    session: int
    handle: int
    def __init__(self, session: _Optional[int] = ..., handle: _Optional[int] = ...) -> None: ...

class JournalPlan(_message.Message):
    __slots__ = ("step_id", "digest")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    digest: int
    def __init__(self, step_id: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class JournalReset(_message.Message):
    __slots__ = ("geometry", "boot_id", "epoch")
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    geometry: _step_pb2.Geometry
    boot_id: int
    epoch: int
    def __init__(self, geometry: _Optional[_Union[_step_pb2.Geometry, _Mapping]] = ..., boot_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class JournalLost(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

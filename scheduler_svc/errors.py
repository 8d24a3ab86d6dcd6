"""What can go wrong, split by whose fault it is.

    StepwireError
    ├── RequestError            one request ends; `status` is a canonical gRPC status name
    │   ├── InvalidArgument     a field is out of bounds (names the field, its value, what is allowed)
    │   ├── NotFound            an unknown model
    │   ├── AlreadyExists       the request_id is live
    │   ├── QueueFull           overload: come back after `retry_after_s`
    │   ├── Unavailable         draining, or the scheduler or executor is away: come back after `retry_after_s`
    │   ├── DeadlineExceeded
    │   ├── Unauthenticated     no API key, or one that is not valid
    │   ├── Unimplemented       a feature this build does not have
    │   └── RequestFailed       our fault: INTERNAL
    ├── ExecutorError           the epoch ends, every request lives on; `reason` says in a word why
    │   ├── ExecutorLost        gone, silent or too slow
    │   └── ProtocolViolation   it said something that its plans do not explain
    └── StartupError            the service cannot start: one line saying what to do, exit status 1

A bug is none of these: it is an `assert`, it ends the process, and the tier above recovers.
"""

from enum import StrEnum


class StepwireError(Exception):
    pass


class RequestError(StepwireError):
    """Ends one request. `field` is the path of the request field at fault, when there is one."""

    status = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float | None = None):
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(RequestError):
    status = "INVALID_ARGUMENT"


class NotFound(RequestError):
    status = "NOT_FOUND"


class AlreadyExists(RequestError):
    status = "ALREADY_EXISTS"


class QueueFull(RequestError):
    status = "RESOURCE_EXHAUSTED"


class Unavailable(RequestError):
    status = "UNAVAILABLE"


class DeadlineExceeded(RequestError):
    status = "DEADLINE_EXCEEDED"


class Unauthenticated(RequestError):
    status = "UNAUTHENTICATED"


class Unimplemented(RequestError):
    status = "UNIMPLEMENTED"


class RequestFailed(RequestError):
    status = "INTERNAL"


REQUEST_ERRORS: dict[str, type[RequestError]] = {
    cls.status: cls
    for cls in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        QueueFull,
        Unavailable,
        DeadlineExceeded,
        Unimplemented,
        RequestFailed,
    )
}


class EndReason(StrEnum):
    """Why an epoch ended."""

    # It cannot be told whether the process ended, was killed or its host went: the connection did.
    CONNECTION = "connection"
    HEARTBEAT = "heartbeat"
    STEP_TIMEOUT = "step_timeout"
    NOT_READING = "not_reading"
    HELLO_AGAIN = "hello_again"
    BAD_FRAME = "bad_frame"
    BAD_RESULT = "bad_result"
    DIGEST = "digest"
    # What executors report of themselves.
    PLAN_REFUSED = "plan_refused"
    NOT_FINITE = "not_finite"
    BAD_COMPUTE = "bad_compute"
    CRASH = "crash"
    FAULT = "fault"


class ExecutorError(StepwireError):
    reason = EndReason.FAULT

    def __init__(self, message: str, reason: EndReason | None = None):
        super().__init__(message)
        self.reason = reason or self.reason


class ExecutorLost(ExecutorError):
    reason = EndReason.CONNECTION


class ProtocolViolation(ExecutorError):
    reason = EndReason.BAD_RESULT


class StartupError(StepwireError):
    """`str(error)` is the one line the operator sees."""

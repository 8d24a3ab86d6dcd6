"""Errors to gRPC statuses with google.rpc details, and the guard every method runs under.

No status is ever UNKNOWN: gateways retry it. What is not a RequestError is our bug: INTERNAL, with no word of what
went on.
"""

import asyncio
import functools
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_svc.errors import RequestError

log = logging.getLogger(__name__)

PUSHBACK = "grpc-retry-pushback-ms"


def to_status(error: RequestError) -> status_pb2.Status:
    code = grpc.StatusCode[error.status]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext, error: RequestError) -> None:
    """Ends the call with the error's status: raises AbortError; CancelledError when the client went away meanwhile."""
    status = rpc_status.to_status(to_status(error))
    trailers = status.trailing_metadata
    if error.retry_after_s is not None:
        # The same advice for gRPC's own retries; RetryInfo is for people and gateways.
        trailers = (*trailers, (PUSHBACK, str(math.ceil(error.retry_after_s * 1000))))
    try:
        await context.abort(status.code, status.details, trailing_metadata=trailers)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None  # nobody is left to tell


Method = Callable[[Any, Any, grpc.aio.ServicerContext], Awaitable[Any]]


def guarded(method: Method) -> Method:
    """Turns whatever a method raises into the right status."""

    @functools.wraps(method)
    async def run(service: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(service, request, context)
        except RequestError as error:
            service.metrics.refused(method.__name__, error.status)
            await abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except grpc.aio.InternalError:
            # A write to a client that is gone; nobody is left to tell.
            log.debug("%s: the client went away during a write", method.__name__)
            raise asyncio.CancelledError from None
        except Exception as error:
            service.metrics.refused(method.__name__, "INTERNAL")
            log.error("%s failed: %s at %s", method.__name__, type(error).__name__, _place(error))
            await abort(context, RequestError("internal error"))

    return run


def _place(error: BaseException) -> str:
    """Where it happened, without values: messages of exceptions may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames[-6:]))

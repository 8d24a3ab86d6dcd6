"""Requests whose bytes are no message of their method: INVALID_ARGUMENT, and no word in the log.

grpc itself would answer UNKNOWN, which gateways retry, and log a traceback that any client can cause at will. Knows
nothing of the methods beyond how they are called.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from scheduler_svc.errors import InvalidArgument
from scheduler_svc.frontend.status import abort

_MALFORMED = object()
_ERROR = InvalidArgument("the request's bytes are not a message of the type that this method takes")


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """For methods that take one message; a stream's messages are read by the method itself."""

    def __init__(self) -> None:
        self._guarded: dict[str, grpc.RpcMethodHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        name = handler_call_details.method
        if name in self._guarded:
            return self._guarded[name]
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        # Only names that exist get here: what is kept is bounded by the number of methods.
        self._guarded[name] = guarded = _guard(handler)
        return guarded


def _guard(handler: Any) -> grpc.RpcMethodHandler:
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if not inspect.iscoroutinefunction(behaviour):
        return handler

    def deserialise(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except DecodeError:
            return _MALFORMED

    async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request is _MALFORMED:
            await abort(context, _ERROR)
        return await behaviour(request, context)

    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
    return make(run, request_deserializer=deserialise, response_serializer=handler.response_serializer)

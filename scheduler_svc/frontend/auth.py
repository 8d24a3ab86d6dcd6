"""Who may call what: with a key file, every method but those of health wants `authorization: Bearer KEY`.

Denied is the default: a service added to the server tomorrow is behind the key like the others. Knows nothing of the
methods. A refusal reads no message, so it costs the same for a small request and for a large one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from scheduler_svc.errors import Unauthenticated
from scheduler_svc.frontend import tenant
from scheduler_svc.frontend.api_keys import Keyring
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.status import abort
from scheduler_svc.watched import Watched

# Balancers and containers ask for health without a key; it tells nothing of anybody.
OPEN = "/grpc.health.v1.Health/"
SCHEME = "bearer"
_MISSING = Unauthenticated("this server wants an API key: send the metadata `authorization: Bearer KEY`")
_UNKNOWN = Unauthenticated("the API key is not valid")


class RequireKey(grpc.aio.ServerInterceptor):
    """Must come before every other interceptor."""

    def __init__(self, keys: Watched[Keyring], metrics: FrontendMetrics):
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(OPEN):
            return await continuation(handler_call_details)
        key = bearer(handler_call_details.invocation_metadata)
        owner = self._keys.get().tenant_of(key) if key is not None else None
        if owner is None:
            self._metrics.refused("any", Unauthenticated.status)
            return _REFUSE_MISSING if key is None else _REFUSE_UNKNOWN
        tenant.enter(owner)
        return await continuation(handler_call_details)


def bearer(metadata: Any) -> str | None:
    """The one key in a call's metadata; None: none, or more than one."""
    values = [value for name, value in metadata or () if name == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        return None
    scheme, _, key = values[0].partition(" ")
    return key.strip() if scheme.lower() == SCHEME else None


def _refusal(error: Unauthenticated) -> grpc.RpcMethodHandler:
    """On the wire every kind of method ends the same way, so one handler refuses all."""

    async def refuse(_messages: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


_REFUSE_MISSING, _REFUSE_UNKNOWN = _refusal(_MISSING), _refusal(_UNKNOWN)

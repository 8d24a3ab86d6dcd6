"""The tenant of the call being answered. Set once, where the caller's key is checked; read where requests are made.

A context variable and not an argument: an entrance that forgot to pass it on would put its callers' prompts into
everybody's cache. Without keys every call belongs to the tenant without a name. Knows nothing of keys or gRPC.
"""

from contextvars import ContextVar

_tenant: ContextVar[str] = ContextVar("tenant", default="")


def enter(tenant: str) -> None:
    _tenant.set(tenant)


def current() -> str:
    return _tenant.get()


def scoped(request_id: str) -> str:
    """The id under which the scheduler knows a client's request: nobody can guess, block or cancel another tenant's.

    Tenants have no slash in their names, so two of these are equal only when both parts are.
    """
    tenant = current()
    return f"{tenant}/{request_id}" if tenant else request_id

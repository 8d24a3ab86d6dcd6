"""What a client that went away meets: nothing, and the log keeps nothing of it."""

import asyncio

import grpc
import pytest

from scheduler_svc.errors import DeadlineExceeded
from scheduler_svc.frontend.status import abort


class Gone:
    """A call whose client left before its status could be written."""

    async def abort(self, *_: object, **__: object) -> None:
        raise grpc.aio.InternalError("execute_batch")


async def test_a_status_for_a_client_that_is_gone_is_a_cancelled_call():
    with pytest.raises(asyncio.CancelledError):
        await abort(Gone(), DeadlineExceeded("the deadline passed"))

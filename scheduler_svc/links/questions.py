"""Questions to the scheduler that wait for their answers, by a random number that the answer repeats.

Knows futures and numbers; nothing of sockets or of what is asked.
"""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from scheduler_svc.errors import Unavailable

RETRY_S = 1.0


class Answer(Protocol):
    query_id: int


class Questions:
    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> Any:
        """The answer to what `send` sends with the number it is given. Raises Unavailable."""
        number = secrets.randbits(63)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            send(number)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise Unavailable(f"the scheduler has not answered for {timeout_s:g} s", retry_after_s=RETRY_S) from None
        finally:
            del self._asked[number]

    def answered(self, answer: Answer) -> None:
        """One that nobody waits for is dropped."""
        future = self._asked.get(answer.query_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, error: Callable[[], Exception]) -> None:
        """None of them will be answered."""
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error())

"""Grammars are compiled one at a time, beside the event loop, and only so many may wait for it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import QueueFull
from scheduler_svc.frontend.grammar import GrammarChecker

MAX_WAITING = 64
RETRY_S = 1.0


class GrammarGate:
    def __init__(self) -> None:
        self._checker = GrammarChecker()
        # A thread of its own: prompts are tokenised while a grammar takes its time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_waiting = 0

    async def resolve(self, sampling: pb.SamplingParams) -> str:
        """The grammar of a constrained request. Raises InvalidArgument for one that is none, QueueFull."""
        known = self._checker.known(sampling)
        if known is not None:
            return known
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull("too many constraints wait to be compiled", retry_after_s=RETRY_S)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._checker.check, sampling)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._checker.close()

"""A TCP relay on loopback that can hold everything back, or cut it: a network between two processes of this host."""

import asyncio
import contextlib
import threading

LIMIT_S = 60.0


class TcpProxy:
    """Relays 127.0.0.1:`port` to 127.0.0.1:`target`, in a thread of its own. `cut_after`: when so many bytes have come
    back, the connection that they came on ends; those after it are whole."""

    def __init__(self, target: int, cut_after: int | None = None):
        self.port = 0
        self._left = cut_after
        self._target = target
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    def __enter__(self) -> "TcpProxy":
        self._thread.start()
        assert self._listening.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def hold(self) -> None:
        """From here on nothing passes, the end of a connection included. Nothing is lost, and nobody is told."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def cut(self) -> None:
        """Both ends of every connection are reset."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._loop.call_soon_threadsafe(abort)

    async def _run(self) -> None:
        self._loop, self._stop, self._flows = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._relays: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._stop.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        for relay in list(self._relays):
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        self._writers.add(writer)
        try:
            await self._flows.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(back)
            try:
                await asyncio.gather(self._relay(reader, back), self._relay_back(there, writer))
            finally:
                self._writers.discard(back)
                back.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy ends: the other side hears of it below
        finally:
            self._relays.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _relay_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._left is None:
            await self._relay(reader, writer)
            return
        while self._left and (data := await reader.read(self._left)):
            await self._flows.wait()
            writer.write(data)
            self._left -= len(data)
        self._left = None
        writer.close()
        await writer.wait_closed()  # all of it has left
        raise ConnectionAbortedError

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flows.wait()
            writer.write(data)
            await writer.drain()
        await self._flows.wait()
        with contextlib.suppress(OSError):
            writer.write_eof()

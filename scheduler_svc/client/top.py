"""`stepwire top`: watches one frontend's admin stream and draws it. Survives whatever it watches; knows no numbers."""

import asyncio
import contextlib
import io
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
from rich.console import Console, Group
from rich.live import Live

from protos.stepwire.admin.v1 import admin_pb2 as pb
from protos.stepwire.admin.v1.admin_pb2_grpc import AdminServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, aio_channel, connect, explain
from scheduler_svc.client.top_rates import History
from scheduler_svc.client.top_view import State, draw
from scheduler_svc.errors import StartupError

RETRY_S = 1.0
ANSWER_TIMEOUT_S = 10.0
ONCE_INTERVAL_MS = 500
# One frame waits that much longer for a step to end, while something runs.
ONCE_EXTRA_S = 4.0
UP, DOWN, ENTER, ESCAPE = "up", "down", "enter", "escape"
KEYS = {"\x1b[A": UP, "\x1bOA": UP, "k": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "j": DOWN, "\r": ENTER, "\n": ENTER}


class Top:
    """The state, and what changes it: answers, keys."""

    def __init__(self, address: str, access: Access = OPEN, *, interactive: bool):
        self.access = access
        self.state = State(address, interactive=interactive)
        self._history = History()
        self._story_wanted = asyncio.Event()

    def heard(self, response: pb.WatchResponse) -> None:
        state = self.state
        state.problem = response.problem
        state.model = response.model
        if response.HasField("snapshot"):
            self._history.add(response.snapshot)
            if not state.paused:
                state.snapshot = self._history.latest
                state.rates, state.points = self._history.rates(), list(self._history.points)
                state.chosen = max(0, min(state.chosen, len(state.row_ids) - 1))

    @property
    def has_seen_steps(self) -> bool:
        """Two snapshots between which a step ended; or there is nothing to do."""
        snapshot = self.state.snapshot
        is_idle = snapshot is not None and not snapshot.num_running + snapshot.num_waiting
        return is_idle or self.state.rates.step_ms is not None

    def pressed(self, key: str) -> bool:
        """False: the end is wanted."""
        state = self.state
        match KEYS.get(key, key):
            case "q" | "Q" | "\x03" | "\x04":
                return False
            case "p" | " ":
                state.paused = not state.paused
            case "up":
                state.chosen = max(0, state.chosen - 1)
            case "down":
                state.chosen = max(0, min(state.chosen + 1, len(state.row_ids) - 1))
            case "enter" if state.story_of:
                state.story_of = ""
            case "enter" if state.row_ids:
                state.story_of, state.story = state.row_ids[state.chosen], []
                self._story_wanted.set()
            case "\x1b":
                state.story_of = ""
        return True

    async def stories(self, stub: AdminServiceStub, changed: Callable[[], None]) -> None:
        """Asks for the story of whoever was chosen."""
        while True:
            await self._story_wanted.wait()
            self._story_wanted.clear()
            try:
                request = pb.GetStoryRequest(request_id=self.state.story_of)
                told = await stub.GetStory(request, timeout=ANSWER_TIMEOUT_S, metadata=self.access.metadata)
                self.state.story = list(told.lines)
            except grpc.RpcError as error:
                self.state.story = [explain(error, self.state.address, self.access)]
            changed()


async def watch(stub: AdminServiceStub, top: Top, interval_ms: int) -> AsyncIterator[None]:
    """Yields after every change, for ever: a frontend that is gone is waited for."""
    while True:
        try:
            async for response in stub.Watch(pb.WatchRequest(interval_ms=interval_ms), metadata=top.access.metadata):
                top.heard(response)
                yield
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:
                raise StartupError(explain(error, top.state.address, top.access)) from None
            top.state.problem = explain(error, top.state.address, top.access)
            yield
        await asyncio.sleep(RETRY_S)


def live(address: str, interval_s: float, access: Access = OPEN) -> None:
    """The view that stays, until q or Ctrl-C."""
    console = Console()
    if not console.is_terminal:
        raise StartupError("top draws on a terminal: use --once where there is none")
    asyncio.run(_live(address, round(interval_s * 1000), console, access))


async def _live(address: str, interval_ms: int, console: Console, access: Access) -> None:
    top = Top(address, access, interactive=True)
    over = asyncio.Event()
    screen = Live(console=console, screen=True, auto_refresh=False)

    def redraw() -> None:
        screen.update(Group(*draw(top.state, console.width, console.height)), refresh=True)

    def pressed(key: str) -> None:
        if not top.pressed(key):
            over.set()
        redraw()

    async def follow(stub: AdminServiceStub) -> None:
        async for _ in watch(stub, top, interval_ms):
            redraw()

    async with aio_channel(address, access) as channel:
        stub = AdminServiceStub(channel)
        with screen, keys(pressed):
            redraw()
            tasks = [asyncio.ensure_future(work) for work in (follow(stub), top.stories(stub, redraw), over.wait())]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


@contextlib.contextmanager
def keys(pressed: Callable[[str], None]) -> Iterator[None]:
    """Calls `pressed` with each key of the terminal, read one by one and not shown. Without a terminal: never."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        # One read is one key, or several that were typed ahead; escape sequences come whole.
        text = os.read(descriptor, 256).decode(errors="replace")
        for key in re.findall(r"\x1b[\[O].|.", text, re.DOTALL):
            pressed(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def once(
    address: str, access: Access = OPEN, *, size: tuple[int, int] | None, record: Path | None, after_s: float = 1.0
) -> None:
    """One frame to stdout, or as a picture (SVG) to `record`. Rates need more than one snapshot: a second at least, and
    ONCE_EXTRA_S more where steps take longer."""
    state = asyncio.run(_once(address, access, num_snapshots=1 + round(1000 * after_s / ONCE_INTERVAL_MS)))
    if state.problem:
        # What was found out here names the address; what the frontend says of itself does not.
        raise StartupError(state.problem if address in state.problem else f"{address}: {state.problem}")
    console = Console()
    width, height = size or (console.width, console.height)
    if record is None:
        Console(width=width).print(Group(*draw(state, width, height)))
        return
    # A recording console writes to a file of its own: the picture is all that is wanted.
    drawn = Console(width=width, height=height, record=True, file=io.StringIO(), force_terminal=True)
    drawn.print(Group(*draw(state, width, height)))
    # Without the web fonts: a picture fetches nothing.
    svg = re.sub(r"@font-face\s*\{[^}]*\}\s*|<!--.*?-->\s*", "", drawn.export_svg(title="stepwire top"))
    svg = svg.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    try:
        record.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {record}: {error.strerror}") from None


async def _once(address: str, access: Access, num_snapshots: int) -> State:
    top = Top(address, access, interactive=False)
    async with aio_channel(address, access) as channel:
        heard, most = 0, num_snapshots + round(1000 * ONCE_EXTRA_S / ONCE_INTERVAL_MS)
        async for _ in watch(AdminServiceStub(channel), top, ONCE_INTERVAL_MS):
            heard += 1
            if heard >= most or top.state.problem or (heard >= num_snapshots and top.has_seen_steps):
                break
    return top.state


def story(address: str, request_id: str, access: Access = OPEN) -> list[str]:
    """The story of one request: of this id, or else of the one that lives and has an id that begins so."""
    with connect(address, access) as channel:
        stub = AdminServiceStub(channel)

        def tell(asked: str) -> list[str]:
            request = pb.GetStoryRequest(request_id=asked)
            return list(stub.GetStory(request, timeout=ANSWER_TIMEOUT_S, metadata=access.metadata).lines)

        try:
            return tell(request_id)
        except grpc.RpcError as error:
            if error.code() not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                raise
            asked = pb.WatchRequest()
            seen = next(stub.Watch(asked, timeout=ANSWER_TIMEOUT_S, metadata=access.metadata)).snapshot
            found = matching([*seen.running.request_ids, *seen.waiting.request_ids], request_id)
            if len(found) > 1:
                raise StartupError(f"--story {request_id}: {len(found)} requests begin so, as {found[0]}") from None
            if not found:
                raise
        return [f"request {found[0]}", *tell(found[0])]


def matching(request_ids: list[str], text: str) -> list[str]:
    """Those that begin with `text`; or as `top` shortens them, the middle left out."""
    head, _, tail = text.partition("…")
    return [name for name in dict.fromkeys(request_ids) if name.startswith(head) and name.endswith(tail)]

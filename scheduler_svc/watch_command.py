"""`stepwire top`: its options. What it draws and where from is in client/top*.py."""

import re
from pathlib import Path
from typing import Annotated

import typer

from scheduler_svc.client.config import DEFAULT_ADDRESS, Access, Address, ApiKey, TlsCa, TlsCert, TlsKey
from scheduler_svc.errors import StartupError

SIZE = re.compile(r"(\d{2,3})x(\d{2,3})")


def top(
    *,
    address: Address = DEFAULT_ADDRESS,
    interval: Annotated[float, typer.Option("--interval", min=0.25, max=60, help="Seconds between frames.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    record: Annotated[str, typer.Option("--record", metavar="FILE.svg", help="Draw one frame into a file.")] = "",
    size: Annotated[str, typer.Option("--size", metavar="WxH", help="Of that frame, as in 100x30.")] = "",
    after: Annotated[
        float, typer.Option("--after", min=1, max=600, help="Seconds to watch before it, up to 4 more for a step.")
    ] = 1,
    story: Annotated[
        str, typer.Option("--story", metavar="REQUEST", help="Print what happened to one, by EPOCH:STEP.")
    ] = "",
    api_key: ApiKey = "",
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
) -> None:
    """A live view: blocks, sequences, where time goes.

    q ends it, arrows choose a row, enter shows its story.
    """
    from scheduler_svc.client import top as view

    access = Access(api_key, tls_ca, tls_cert, tls_key)
    if story:
        print("\n".join(view.story(address, story, access)))
    elif once or record:
        view.once(address, access, size=_size(size), record=_picture(record), after_s=after)
    else:
        view.live(address, interval, access)


def _size(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    found = SIZE.fullmatch(text)
    if found is None:
        raise StartupError(f"--size {text!r}: write WIDTHxHEIGHT in characters, as in 100x30")
    return int(found[1]), int(found[2])


def _picture(text: str) -> Path | None:
    if text and not text.endswith(".svg"):
        raise StartupError(f"--record {text!r}: the picture is an SVG, name it so")
    return Path(text) if text else None

"""Renders a model's chat template in a process of its own, so that no template can hurt a frontend.

Run as a script, with nothing of ours imported: the parent starts it, sends one setup message and then one message per
rendering (4 bytes of length, then JSON), and kills it when an answer does not come. The sandbox keeps templates from
reaching Python; the limits here keep them from eating time and memory, which a sandbox does not.
"""

import datetime
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

LENGTH = struct.Struct("<I")


class TemplateRefused(Exception):
    """The template itself said no, through raise_exception."""


class LimitExceeded(Exception):
    pass


class GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks training targets, and renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node | list[jinja2.nodes.Node]":
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What chat templates are written for: Hugging Face's dialect."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateRefused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def variables(source: str) -> list[str]:
    """Names the template reads and does not set: what a caller may pass."""
    env = environment()
    return sorted(jinja2.meta.find_undeclared_variables(env.parse(source)) - set(env.globals))


def render(template: jinja2.Template, values: dict[str, Any], max_chars: int) -> str:
    parts, size = [], 0
    for part in template.generate(**values):
        size += len(part)
        if size > max_chars:
            raise LimitExceeded
        parts.append(part)
    return "".join(parts)


def _answer(template: jinja2.Template, message: dict[str, Any], cpu_s: float) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        return {"text": render(template, message["values"], message["max_chars"])}
    except (LimitExceeded, MemoryError, RecursionError):
        return {"error": "limit"}
    except TemplateRefused as error:
        return {"error": "refused", "message": str(error)[:200]}
    except Exception as error:  # a template can fail in any way Python can
        return {"error": "failed", "message": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _on_time_up(_signum: int, _frame: object) -> None:
    raise LimitExceeded


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    return json.loads(stream.read(LENGTH.unpack(header)[0]))


def _write(stream: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this ends
    signal.signal(signal.SIGVTALRM, _on_time_up)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(source)
    if setup is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        template = environment().from_string(setup["template"])
        ready = {"variables": variables(setup["template"])}
    except Exception as error:
        _write(sink, {"error": f"{type(error).__name__}: {error}"[:300]})
        return
    _write(sink, ready)
    while (message := _read(source)) is not None:
        _write(sink, _answer(template, message, setup["cpu_s"]))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        # Nobody waits for the answer: the frontend was killed. Nothing to flush at exit either.
        os._exit(0)

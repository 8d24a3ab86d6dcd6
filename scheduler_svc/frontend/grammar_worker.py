"""Compiles clients' constraints in a process of its own, so that no grammar can hurt a frontend.

Run as a script, with nothing of ours imported: one setup message, then one message per constraint (4 bytes of length,
then JSON). An answer is the grammar in llguidance's own form, or why there is none. A constraint that takes more of the
process's time than the setup allows ends the process.
"""

import json
import re
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

LENGTH = struct.Struct("<I")


class Refused(Exception):
    """The client's fault; `str(error)` is for the client."""


def grammar(kind: str, value: Any) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(value)))
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type": "object"}')
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(s, ensure_ascii=False) for s in value))
    if not value.strip():
        raise Refused("it is empty")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(value) if "::=" in value else value)
    except GbnfToLarkError as error:
        raise Refused(f"not a GBNF grammar: {error}") from None


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except ValueError:
        raise Refused("not a JSON text") from None
    if not isinstance(schema, dict | bool):
        raise Refused("a schema is a JSON object or a boolean")
    return schema


def explain(error: str) -> str:
    """llguidance's complaint in one line, without its drawing of the place in the grammar."""
    lines = [line.strip() for line in error.splitlines()]
    reasons = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    first = re.sub(r'(invalid regex) ".*', r"\1", lines[0] if lines else "") or "no reason given"
    return ": ".join([first, *reasons[:1]])[:300]


def answer(message: dict[str, Any], limits: LLParserLimits) -> dict[str, str]:
    try:
        text = grammar(message["kind"], message["value"])
        error = LLMatcher.validate_grammar(text, limits=limits)
    except Refused as refused:
        return {"error": "refused", "message": str(refused)[:300]}
    except (MemoryError, RecursionError):
        return {"error": "limit"}
    except Exception as failure:  # the library raises what it likes for what it cannot read
        return {"error": "refused", "message": type(failure).__name__}
    if error and not error.startswith("WARNING"):
        return {"error": "refused", "message": explain(error)}
    return {"grammar": text}


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
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(source)
    if setup is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(**setup["limits"], verbose_errors=False)
    _write(sink, {"ready": True})
    while (message := _read(source)) is not None:
        # Nobody handles SIGPROF: it ends the process wherever that is.
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_s"])
        found = answer(message, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, found)


if __name__ == "__main__":
    main()

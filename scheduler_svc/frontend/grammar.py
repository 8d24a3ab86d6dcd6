"""Constraints before they are queued: translated to one form, compiled once to see whether they can be, refused early.

This is the one place that judges a grammar. The executor compiles it again, with the same limits, and follows it; that
nothing surprising reaches its step loop is what the deadline here is for. Knows nothing of gRPC or tokens.
"""

import json
import threading
from collections import OrderedDict
from pathlib import Path

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.errors import InvalidArgument, Unavailable
from scheduler_svc.frontend.child import Child

WORKER = Path(__file__).with_name("grammar_worker.py")

# llguidance's LLParserLimits; those of the executor are the same, a test says so.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
}
# Of the compiler's own time; what others take from it on a busy machine counts only by the second limit.
COMPILE_LIMIT_S, WALL_LIMIT_S = 1.0, 10.0
START_LIMIT_S = 30.0
MEMORY_LIMIT_BYTES = 1 << 30
# Accepted grammars that are remembered: clients send the same schema again and again.
MAX_KEPT, MAX_KEPT_BYTES = 256, 8 << 20


class GrammarChecker:
    """Thread-safe. Compiles one constraint at a time; the process starts with the first one."""

    def __init__(self, compile_limit_s: float = COMPILE_LIMIT_S) -> None:
        self._limit_s = compile_limit_s
        self._child: Child | None = None
        self._lock = threading.Lock()
        # (kind, text) -> grammar, the one used last at the end.
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._kept_bytes = 0

    def known(self, sampling: pb.SamplingParams) -> str | None:
        """The grammar of a constraint that was accepted lately."""
        return self._kept.get(_key(sampling))

    def check(self, sampling: pb.SamplingParams) -> str:
        """The grammar of the constraint of `sampling`. Raises InvalidArgument; takes no longer than the limits."""
        key = kind, text = _key(sampling)
        field = f"sampling.{kind}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            value = list(sampling.choice.choices) if kind == "choice" else text
            answer = self._running().ask({"kind": kind, "value": value}, WALL_LIMIT_S)
            if answer.get("error") == "limit" and self._child is not None:
                self._child.close()
                self._child = None
            if "grammar" in answer:
                self._keep(key, answer["grammar"])
                return answer["grammar"]
        if answer["error"] == "refused":
            raise InvalidArgument(f"{field} cannot be compiled: {answer['message']}", field=field)
        raise InvalidArgument(
            f"{field} is too large: it cannot be compiled within {self._limit_s:g} s and "
            f"{MEMORY_LIMIT_BYTES >> 20} MiB",
            field=field,
        )

    def close(self) -> None:
        with self._lock:
            if self._child is not None:
                self._child.close()
                self._child = None

    def _running(self) -> Child:
        if self._child is not None and self._child.is_dead:
            self._child.close()
            self._child = None
        if self._child is None:
            child = Child(WORKER)
            answer = child.ask(
                {"limits": LIMITS, "memory_bytes": MEMORY_LIMIT_BYTES, "cpu_s": self._limit_s}, START_LIMIT_S
            )
            if "ready" not in answer:
                child.close()
                raise Unavailable("constraints cannot be compiled here: their process does not start")
            self._child = child
        return self._child

    def _keep(self, key: tuple[str, str], grammar: str) -> None:
        self._kept[key] = grammar
        self._kept_bytes += len(key[1]) + len(grammar)
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            (_, text), old = self._kept.popitem(last=False)
            self._kept_bytes -= len(text) + len(old)


def _key(sampling: pb.SamplingParams) -> tuple[str, str]:
    kind = sampling.WhichOneof("constraint")
    assert kind is not None
    if kind == "choice":
        return kind, json.dumps(list(sampling.choice.choices))
    return kind, "" if kind == "json_object" else getattr(sampling, kind)

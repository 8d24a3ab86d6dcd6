"""The core as data: its graph of objects written down, and made again from that. Nothing that is read is executed.

Only what is listed here is understood: plain values, containers, arrays, wire messages, and objects of classes that
live in the core. Anything else is an error when it is written, so a snapshot is whole or is not made. Objects are nodes
that refer to each other by number; an array that is a view of another one is a view again.

    {"nodes": [[kind, ...], ...]}   zlib(JSON); node 0 is the root; arrays and bytes are base64
"""

import base64
import importlib
import json
import sys
import types
import zlib
from collections import Counter, OrderedDict, deque
from enum import Enum
from typing import Any

import numpy as np
from google.protobuf.message import Message

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.errors import StepwireError

HOME = "scheduler_svc.core"
MAX_BYTES = 2**31
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


class SnapshotError(StepwireError):
    pass


def take(root: object) -> bytes:
    return zlib.compress(json.dumps(_Writer().write(root), separators=(",", ":")).encode(), 1)


def restore(data: bytes) -> Any:
    """Raises SnapshotError for anything that `take` of this version does not write."""
    try:
        unpacked = zlib.decompressobj().decompress(data, MAX_BYTES)
        return _Reader(json.loads(unpacked)).read()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, zlib.error) as error:
        raise SnapshotError(f"the snapshot cannot be read: {type(error).__name__}") from error


def _state(value: object) -> dict[str, Any]:
    """Attributes by name, of slots and of the instance's dictionary."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        # Keeps what is made on the way alive: an id must not be used twice.
        self._values: list[Any] = []

    def write(self, root: object) -> list[Any]:
        self._refer(root)
        nodes: list[Any] = []
        while len(nodes) < len(self._values):
            nodes.append(self._node(self._values[len(nodes)]))
        return nodes

    def _refer(self, value: Any) -> Any:
        """Plain values as they are; for everything else, [its number]."""
        if value is None or type(value) in (bool, int, str):
            return value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
        return [number]

    def _items(self, values: Any) -> list[Any]:
        return [self._refer(value) for value in values]

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        match value:
            case float():
                return ["float", value.hex()]
            case bytes() | bytearray():
                return [kind.__name__, _text(bytes(value))]
            case Enum():
                return ["enum", kind.__module__, kind.__name__, value.name]
            case Message():
                return ["message", kind.__name__, _text(value.SerializeToString(deterministic=True))]
            case np.ndarray():
                return self._array(value)
            case np.generic():
                return ["scalar", value.dtype.str, _text(value.tobytes())]
            case slice():
                return ["slice", value.start, value.stop, value.step]
            case deque():
                return ["deque", value.maxlen, self._items(value)]
            case types.MethodType():
                return ["method", self._refer(value.__self__), value.__name__]
            case types.FunctionType() if value.__qualname__ == value.__name__ and value.__module__.startswith(HOME):
                return ["function", value.__module__, value.__name__]
        if kind in (list, tuple, set, frozenset):
            return [kind.__name__, self._items(value)]
        if kind.__name__ in _DICTS and kind is _DICTS[kind.__name__]:
            return [kind.__name__, [[self._refer(key), self._refer(item)] for key, item in value.items()]]
        if not kind.__module__.startswith(HOME):
            raise SnapshotError(f"a snapshot cannot hold a {kind.__module__}.{kind.__name__}")
        if isinstance(value, tuple):
            return ["named", kind.__module__, kind.__name__, self._items(value)]
        return ["object", kind.__module__, kind.__name__, {k: self._refer(v) for k, v in _state(value).items()}]

    def _array(self, value: np.ndarray) -> list[Any]:
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if owner is value or (id(owner) not in self._numbers and not self._is_shared(owner)):
            flat = np.ascontiguousarray(value)
            return ["array", value.dtype.str, list(value.shape), _text(flat.tobytes())]
        offset = value.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return ["view", self._refer(owner), value.dtype.str, offset, list(value.shape), list(value.strides)]

    @staticmethod
    def _is_shared(owner: np.ndarray) -> bool:
        """Others than the one view may write to it."""
        return owner.flags.writeable and owner.base is None


class _Reader:
    def __init__(self, nodes: list[Any]):
        self._nodes = nodes
        self._made: dict[int, Any] = {}

    def read(self) -> Any:
        return self._value([0])

    def _value(self, item: Any) -> Any:
        if not isinstance(item, list):
            return item
        (number,) = item
        if number not in self._made:
            # Deep chains of objects are followed by a list, not by calls: an object is made empty and filled later.
            pending: list[tuple[Any, list[Any]]] = []
            value = self._make(number, pending)
            while pending:
                shell, node = pending.pop()
                self._fill(shell, node, pending)
            return value
        return self._made[number]

    def _get(self, item: Any, pending: list[tuple[Any, list[Any]]]) -> Any:
        if not isinstance(item, list):
            return item
        (number,) = item
        return self._made[number] if number in self._made else self._make(number, pending)

    def _make(self, number: int, pending: list[tuple[Any, list[Any]]]) -> Any:
        node = self._nodes[number]
        value = self._shell(node, pending)
        self._made[number] = value
        if node[0] in ("list", "set", "deque", "object", *_DICTS):
            pending.append((value, node))
        return value

    def _shell(self, node: list[Any], pending: list[tuple[Any, list[Any]]]) -> Any:
        kind, *rest = node
        match kind:
            case "float":
                return float.fromhex(rest[0])
            case "bytes":
                return _bytes(rest[0])
            case "bytearray":
                return bytearray(_bytes(rest[0]))
            case "enum":
                return _class(rest[0], rest[1])[rest[2]]
            case "message":
                return _message(rest[0]).FromString(_bytes(rest[1]))
            case "array":
                array = np.empty(rest[1], _dtype(rest[0]))
                array.reshape(-1)[:] = np.frombuffer(_bytes(rest[2]), array.dtype)
                return array
            case "scalar":
                return np.frombuffer(_bytes(rest[1]), _dtype(rest[0]))[0]
            case "view":
                owner = self._get(rest[0], pending)
                return np.ndarray(rest[3], _dtype(rest[1]), owner, rest[2], rest[4])
            case "tuple" | "frozenset":
                values = [self._get(item, pending) for item in rest[0]]
                return tuple(values) if kind == "tuple" else frozenset(values)
            case "named":
                return _class(rest[0], rest[1])(*(self._get(item, pending) for item in rest[2]))
            case "method":
                return getattr(self._get(rest[0], pending), rest[1])
            case "function":
                return getattr(_module(rest[0]), rest[1])
            case "slice":
                return slice(*rest)
            case "deque":
                return deque(maxlen=rest[0])
            case "object":
                made = _class(rest[0], rest[1])
                return made.__new__(made)
            case "list" | "set":
                return [] if kind == "list" else set()
        return _DICTS[kind]()

    def _fill(self, shell: Any, node: list[Any], pending: list[tuple[Any, list[Any]]]) -> None:
        content = node[-1]
        if node[0] == "object":
            for name, item in content.items():
                object.__setattr__(shell, name, self._get(item, pending))
        elif node[0] in _DICTS:
            for key, item in content:
                shell[self._get(key, pending)] = self._get(item, pending)
        elif node[0] == "set":
            shell.update(self._get(item, pending) for item in content)
        else:
            shell.extend(self._get(item, pending) for item in content)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _module(name: str) -> types.ModuleType:
    if name != HOME and not name.startswith(f"{HOME}."):
        raise SnapshotError(f"a snapshot may not name {name}")
    return sys.modules.get(name) or importlib.import_module(name)


def _class(module: str, name: str) -> Any:
    found = getattr(_module(module), name)
    if not isinstance(found, type) or found.__module__ != module:
        raise SnapshotError(f"a snapshot may not name {module}.{name}")
    return found


def _message(name: str) -> Any:
    return getattr(step_pb2, name, None) or getattr(session_pb2, name)


def _dtype(text: str) -> np.dtype:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise SnapshotError("a snapshot may not hold arrays of objects")
    return dtype

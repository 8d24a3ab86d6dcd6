"""Weights in the native engine's form: panels of sixteen outputs, in one arena of huge pages.

They are packed on threads, a piece at a time: an address is known at once, what lies there after `settle`.
"""

import ctypes
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import BITS_OF_BFLOAT16, widened
from executor_svc.model.native import BF16, F16, F32, I16, INT8, Engine
from executor_svc.model.weights import LinearWeights

PANEL, PAIR = 16, 32
_HUGE_PAGE = 2 << 20
_PIECE = 1 << 20  # elements that a thread packs at once
_KINDS = {np.dtype(np.float32): F32, BITS_OF_BFLOAT16: BF16, np.dtype(np.float16): F16}


def kind_of(dtype: np.dtype) -> int:
    """The engine's number for an element type."""
    return _KINDS[dtype]


def padded_bytes(size: int, kind: int) -> int:
    """Bytes of one row of `size` activations, padded as the matrix kernel wants it: to 64 of them."""
    return _round_up(size, 64) * {F32: 4, BF16: 2, I16: 2}[kind]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _words(kind: int, inputs: int) -> int:
    """engine.h: words_per."""
    return {F32: inputs, BF16: _round_up(inputs, 32) // 2, INT8: _round_up(inputs, 64) // 4}[kind]


def _packed_bytes(kind: int, outputs: int, inputs: int) -> int:
    return _round_up(outputs, PAIR) * _words(kind, inputs) * 4


@dataclass
class PackedLinear:
    """One packed matrix; arrays are kept alive here, the engine sees their addresses."""

    n: int
    k: int
    weight: int  # address in the arena
    bias: np.ndarray | None
    scale: np.ndarray | None


class Arena:
    """All packed weights of a model, in one mapping."""

    def __init__(self, engine: Engine, config: ModelConfig, kind: int, num_threads: int = 1):
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pack")
        self._pieces: list[Future[None]] = []
        self.engine, self.kind = engine, kind
        gate_up = 2 * _round_up(config.intermediate_size, PANEL)
        per_layer = (
            (config.q_size + 2 * config.kv_size, config.hidden_size),
            (config.hidden_size, config.q_size),
            (gate_up, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        )
        size = config.num_layers * sum(_packed_bytes(kind, n, k) for n, k in per_layer)
        self.num_bytes = size + _packed_bytes(kind, config.vocab_size, config.hidden_size)
        self._map = mmap.mmap(-1, self.num_bytes + _HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._next = _round_up(ctypes.addressof(ctypes.c_char.from_buffer(self._map)), _HUGE_PAGE)
        self._end = self._next + self.num_bytes

    def pack(self, weights: LinearWeights) -> PackedLinear:
        """y = x @ weight.T + bias."""
        return self._pack([weights])

    def pack_gated(self, weights: LinearWeights) -> PackedLinear:
        """Gate and up projection, panel by panel in turn, so that they meet in registers."""
        half = weights.weight.shape[0] // 2
        biases = (None, None) if weights.bias is None else (weights.bias[:half], weights.bias[half:])
        parts = [LinearWeights(weights.weight[:half], biases[0]), LinearWeights(weights.weight[half:], biases[1])]
        return self._pack(parts)

    def settle(self) -> None:
        """Waits until everything is packed; what it was packed from is no longer held."""
        for piece in self._pieces:
            piece.result()
        self._pieces.clear()

    def close(self) -> None:
        """Nothing more will be packed."""
        self.settle()
        self._threads.shutdown()

    def _pack(self, parts: list[LinearWeights]) -> PackedLinear:
        outputs, k = parts[0].weight.shape
        every = len(parts)
        n = outputs if every == 1 else every * _round_up(outputs, PANEL)
        width = _round_up(every * _round_up(outputs, PANEL), PAIR)
        quantised = self.kind == INT8
        packed = PackedLinear(
            n,
            k,
            self._take(_packed_bytes(self.kind, width, k)),
            np.zeros(width, np.float32) if parts[0].bias is not None else None,
            np.zeros(width, np.float32) if quantised else None,
        )
        for first, part in enumerate(parts):
            self._pack_part(packed, part, first, every)
        return packed

    def _pack_part(self, packed: PackedLinear, part: LinearWeights, first: int, every: int) -> None:
        """Panel p of `part` becomes panel first + p * every."""
        outputs, k = part.weight.shape
        panels = max(1, _PIECE // (PANEL * k))
        for panel in range(0, -(-outputs // PANEL), panels):
            rows = part.weight[panel * PANEL : (panel + panels) * PANEL]
            self._pieces.append(self._threads.submit(self._pack_rows, packed, rows, first + panel * every, every))
        if packed.bias is not None and part.bias is not None:
            padded = np.zeros(_round_up(outputs, PANEL), np.float32)
            padded[:outputs] = widened(part.bias)
            packed.bias[: every * padded.size].reshape(-1, every, PANEL)[:, first] = padded.reshape(-1, PANEL)

    def _pack_rows(self, packed: PackedLinear, rows: np.ndarray, first: int, every: int) -> None:
        weight = rows if rows.dtype in (np.float32, BITS_OF_BFLOAT16) else widened(rows)
        weight = np.ascontiguousarray(weight)
        outputs, k = weight.shape
        i64 = ctypes.c_int64
        common = (ctypes.c_void_p(weight.ctypes.data), ctypes.c_int(kind_of(weight.dtype)), i64(outputs), i64(k))
        place = (i64(first), i64(every), ctypes.c_void_p(packed.weight))
        if packed.scale is not None:
            self.engine.library.pack_weight_int8(*common, *place, ctypes.c_void_p(packed.scale.ctypes.data))
        else:
            self.engine.library.pack_weight(*common, ctypes.c_int(self.kind), *place)

    def _take(self, num_bytes: int) -> int:
        address = self._next
        self._next += num_bytes
        assert self._next <= self._end, "the arena was sized from the same config"
        return address

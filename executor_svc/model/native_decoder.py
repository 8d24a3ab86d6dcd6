"""The decoder on the native engine: the model becomes a tape of operations once, then every step is one call.

Nothing here computes. What a layer consists of is read off the config, as in the torch decoder; the tape holds
addresses of weights, numbers of buffers and constants, and the engine walks it with its threads.
"""

import ctypes
from typing import Any

import numpy as np

from executor_svc.model import native
from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import BITS_OF_BFLOAT16, array_type, as_bfloat16, widened
from executor_svc.model.native import ADD, BF16, F32, GLU, I16, INT8, STORE, Engine
from executor_svc.model.native_weights import Arena, PackedLinear, kind_of, padded_bytes
from executor_svc.model.rope import rope_tables
from executor_svc.model.weights import LayerWeights, Progress, WeightSource, each_layer

# Buffers of a step. Those of 16-bit integers have their scales in *_SCALE: WIDE_16, and HIDDEN where they are wanted.
RESIDUAL, HIDDEN, PROJECTED, QUERIES, ATTENDED, GATED, LOGITS, HIDDEN_SCALE, WIDE_16, WIDE_SCALE = range(10)
LAST_RESIDUAL, LAST_ATTENDED, NUM_BUFFERS = 10, 11, 12
ROWS = 32  # the matrix kernel touches rows in thirty-twos


def unsupported(config: ModelConfig) -> str | None:
    """Why the engine cannot run this model, or None."""
    if any(layer.is_sparse for layer in config.layers):
        return "mixture of experts"
    if config.head_dim % 16 or config.head_dim > 256:
        return f"head size {config.head_dim}"
    if config.num_heads // config.num_kv_heads > ROWS:
        return "too many query heads per key head"
    if config.activation not in native.ACTIVATIONS:
        return f"activation {config.activation}"
    return None


class NativeDecoder:
    """One model on the native engine."""

    def __init__(
        self,
        source: WeightSource,
        engine: Engine,
        *,
        kind: int,
        num_threads: int,
        progress: Progress | None = None,
    ):
        self.config = config = source.config
        self.engine, self.kind, self.num_threads = engine, kind, num_threads
        # Activations between operations, and as a matrix wants them on its left.
        self.activations = BF16 if kind != F32 and engine.pairs else F32
        self.factors = I16 if kind == INT8 and not engine.pairs else self.activations
        self.kv_kind = F32 if kind == F32 else BF16
        self.kv_dtype = "bfloat16" if self.kv_kind == BF16 else "float32"
        dtype = {F32: "float32", BF16: "bfloat16", INT8: "int8"}[kind]
        self.description = f"native engine, {engine.name}, {num_threads} threads, {dtype} weights"
        self.nanoseconds: np.ndarray | None = None  # per kind of operation, when someone wants to know
        self._keep: list[Any] = []  # what the tape points to
        self._arena = Arena(engine, config, kind, num_threads)
        self._ops: list[native.Op] = []
        self._ropes = [
            [self._address(table) for table in rope_tables(rope, config.max_position)] for rope in config.ropes
        ]
        try:
            self._build(source, progress)
        finally:
            self._arena.close()
        source.finish()
        self._tape = (native.Op * len(self._ops))(*self._ops)
        self._buffers = (native.Buffer * NUM_BUFFERS)()
        self._memory: list[np.ndarray] = []
        self._capacity = self._logits_capacity = 0
        self._kv: Any = None

    # -- building the tape ------------------------------------------------------------------------------------------

    def _build(self, source: WeightSource, progress: Progress | None) -> None:
        config = self.config
        embedding = self._own(source.embedding())
        self._op(
            native.EMBED,
            target=RESIDUAL,
            kind=kind_of(embedding.dtype),
            weight=embedding.ctypes.data,
            n=config.hidden_size,
            factor=config.embedding_scale,
        )
        for index, weights in enumerate(each_layer(source, progress)):
            self._layer(weights, index, last=index + 1 == config.num_layers)
            self._arena.settle()
            source.release()
        self._norm(LAST_RESIDUAL, source.final_norm(), few=1)
        head = self._arena.pack(source.head())
        cap = config.logits_softcap or 0.0
        self._linear(head, HIDDEN, LOGITS, STORE, few=1, factor=config.logits_scale, softcap=cap)

    def _layer(self, weights: LayerWeights, index: int, last: bool) -> None:
        config, spec = self.config, self.config.layers[index]
        self._norm(RESIDUAL, weights.attention_in)
        self._linear(self._arena.pack(weights.qkv), HIDDEN, PROJECTED, STORE)
        cosine, sine = self._ropes[spec.rope] if spec.rope is not None else (None, None)
        self._op(
            native.ROPE,
            source=PROJECTED,
            target=QUERIES,
            target_kind=self.activations,
            layer=index,
            cosine=cosine,
            sine=sine,
            rope_dim=0 if spec.rope is None else config.ropes[spec.rope].dim,
            q_norm=self._parameter(weights.q_norm),
            k_norm=self._parameter(weights.k_norm),
        )
        self._op(
            native.ATTENTION,
            source=QUERIES,
            target=ATTENDED,
            target_kind=self.activations,
            layer=index,
            window=spec.window or 0,
            factor=config.attention_scale,
            softcap=config.attention_softcap or 0.0,
        )
        residual, attended = RESIDUAL, ATTENDED
        if last:  # from here on only the rows whose logits are wanted
            residual, attended = LAST_RESIDUAL, LAST_ATTENDED
            element = 2 if self.activations == BF16 else 4
            self._op(native.GATHER, source=RESIDUAL, target=residual, n=4 * config.hidden_size, few=1)
            self._op(native.GATHER, source=ATTENDED, target=attended, n=element * config.q_size, few=1)
        self._branch_end(self._arena.pack(weights.output), attended, residual, weights.attention_out, few=int(last))
        self._norm(residual, weights.mlp_in, few=int(last))
        assert weights.gate_up is not None
        assert weights.down is not None
        gate_up = self._arena.pack_gated(weights.gate_up)
        activation = native.ACTIVATIONS[config.activation]
        self._linear(gate_up, HIDDEN, GATED, GLU, few=int(last), activation=activation, target_kind=self.activations)
        self._branch_end(self._arena.pack(weights.down), GATED, residual, weights.mlp_out, few=int(last))

    def _branch_end(self, linear: PackedLinear, source: int, residual: int, norm: np.ndarray | None, few: int) -> None:
        """Project, norm where the family does, add to the residual stream."""
        scale = self.config.residual_scale
        if self.factors == I16:
            self._op(
                native.QUANTISE,
                source=source,
                target=WIDE_16,
                row_scale=WIDE_SCALE,
                target_kind=I16,
                n=linear.k,
                few=few,
            )
            source = WIDE_16
        if norm is None:
            self._linear(linear, source, residual, ADD, few=few, factor=scale)
            return
        self._linear(linear, source, PROJECTED, STORE, few=few)
        self._op(
            native.NORM,
            source=PROJECTED,
            target=residual,
            epilogue=ADD,
            weight=self._parameter(norm),
            n=self.config.hidden_size,
            factor=scale,
            few=few,
        )

    def _norm(self, source: int, weight: np.ndarray | None, few: int = 0) -> None:
        self._op(
            native.NORM,
            source=source,
            target=HIDDEN,
            row_scale=HIDDEN_SCALE,
            target_kind=self.factors,
            weight=self._parameter(weight),
            n=self.config.hidden_size,
            few=few,
        )

    def _linear(self, linear: PackedLinear, source: int, target: int, epilogue: int, **more: Any) -> None:
        self._op(
            native.LINEAR,
            kind=self.kind,
            source=source,
            target=target,
            epilogue=epilogue,
            row_scale=HIDDEN_SCALE if source == HIDDEN else WIDE_SCALE,
            n=linear.n,
            k=linear.k,
            weight=linear.weight,
            bias=self._address(linear.bias),
            scale=self._address(linear.scale),
            **more,
        )

    def _op(self, code: int, **fields: Any) -> None:
        self._ops.append(native.Op(code=code, epsilon=self.config.norm_eps, **({"factor": 1.0} | fields)))

    def _own(self, embedding: np.ndarray) -> np.ndarray:
        """A copy that keeps no file open, in two bytes where the weights have no more than that."""
        wide = self.kind == F32 and embedding.dtype != BITS_OF_BFLOAT16
        copy = widened(embedding) if wide else as_bfloat16(embedding)
        self._keep.append(copy)
        return copy

    def _parameter(self, weight: np.ndarray | None) -> int | None:
        return None if weight is None else self._address(widened(weight))

    def _address(self, array: np.ndarray | None) -> int | None:
        if array is None:
            return None
        self._keep.append(array)
        return array.ctypes.data

    # -- running it -------------------------------------------------------------------------------------------------

    def forward(self, batch: Any, kv: Any) -> np.ndarray:
        """Float32 logits [len(batch.logits_index), vocab_size], valid until the next call."""
        num_tokens, num_logits = int(batch.num_tokens), len(batch.logits_index)
        self._reserve(num_tokens, num_logits)
        self._see(kv)
        arrays = [
            np.ascontiguousarray(getattr(batch, name), np.int32)
            for name in ("token_ids", "positions", "cu_seqlens", "seq_lens", "block_tables", "logits_index")
        ]
        slots = np.ascontiguousarray(batch.slot_mapping, np.int64)
        assert len(slots) == len(arrays[0]) == len(arrays[1]) == num_tokens
        assert len(arrays[2]) == len(arrays[3]) + 1 == len(arrays[4]) + 1
        step, config = self._step, self.config
        names = ("token_ids", "positions", "cu_seqlens", "seq_lens", "block_tables", "logits_index")
        for name, array in zip(names, arrays, strict=True):
            setattr(step, name, array.ctypes.data)
        step.slot_mapping = slots.ctypes.data
        step.num_tokens, step.num_rows, step.num_logits = num_tokens, len(arrays[3]), num_logits
        step.table_stride = arrays[4].shape[1]
        step.nanoseconds = None if self.nanoseconds is None else self.nanoseconds.ctypes.data
        wrong = self.engine.library.engine_run(ctypes.addressof(step), ctypes.addressof(self._tape), len(self._tape))
        if wrong:
            raise AssertionError(f"the batch's {wrong.decode()} is out of range")
        return self._logits[:num_logits] if num_logits else np.empty((0, config.vocab_size), np.float32)

    def _see(self, kv: Any) -> None:
        """Note the addresses of the pages, once per pool."""
        if kv is self._kv:
            return
        config = self.config
        shape = (kv.num_blocks, config.num_kv_heads, kv.block_size, config.head_dim)
        for pages in kv.pages:
            for array in pages:
                assert array.shape == shape
                assert array.dtype == array_type(self.kv_dtype)
                assert array.flags.c_contiguous
        pointers = [
            (ctypes.c_void_p * config.num_layers)(*(pages[i].ctypes.data for pages in kv.pages)) for i in (0, 1)
        ]
        self._pointers, self._kv = pointers, kv
        self._step = native.Step(
            key_pages=ctypes.addressof(pointers[0]),
            value_pages=ctypes.addressof(pointers[1]),
            buffers=ctypes.addressof(self._buffers),
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_position=config.max_position,
            kv_kind=self.kv_kind,
            full_norm=config.family.qk_norm == "full",
            num_threads=self.num_threads,
        )

    def _reserve(self, num_tokens: int, num_logits: int) -> None:
        """Room for the step's activations; grows, never shrinks."""
        if num_tokens > self._capacity:
            self._capacity = -(-max(num_tokens, 2 * self._capacity if self._capacity < 512 else 0) // ROWS) * ROWS
            self._memory = []
            for index, row_bytes in self._row_bytes().items():
                memory = np.zeros(self._capacity * row_bytes + 64, np.uint8)
                self._memory.append(memory)
                self._buffers[index] = native.Buffer(-(-memory.ctypes.data // 64) * 64, row_bytes)
        if num_logits > self._logits_capacity:
            self._logits_capacity = -(-num_logits // ROWS) * ROWS
            self._logits = np.empty((self._logits_capacity, self.config.vocab_size), np.float32)
            self._buffers[LOGITS] = native.Buffer(self._logits.ctypes.data, self.config.vocab_size * 4)

    def _row_bytes(self) -> dict[int, int]:
        config, activations = self.config, self.activations
        gated = -(-config.intermediate_size // 16) * 16
        projected = max(config.q_size + 2 * config.kv_size, config.hidden_size)
        return {
            RESIDUAL: padded_bytes(config.hidden_size, F32),
            LAST_RESIDUAL: padded_bytes(config.hidden_size, F32),
            HIDDEN: padded_bytes(config.hidden_size, self.factors),
            PROJECTED: padded_bytes(projected, F32),
            QUERIES: padded_bytes(config.q_size, activations),
            ATTENDED: padded_bytes(config.q_size, activations),
            LAST_ATTENDED: padded_bytes(config.q_size, activations),
            GATED: padded_bytes(gated, activations),
            WIDE_16: padded_bytes(max(gated, config.q_size), I16),
            HIDDEN_SCALE: 4,
            WIDE_SCALE: 4,
        }

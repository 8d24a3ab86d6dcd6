"""Makes Triton's interpreter compute bfloat16 and float8 as hardware does, so that kernels can be judged without a
device.

The interpreter holds bfloat16 as uint16 bit patterns and then lets numpy do integer arithmetic on them: products and
sums are nonsense, silently, and conversions truncate. This replaces the few builder methods through which every
operation and every conversion passes: operands are widened to float32, the operation is done there, and the result is
rounded to nearest even.

Import it after TRITON_INTERPRET=1 is set and before a kernel runs. `test_shim.py` proves it on random data and fails
loudly when a Triton upgrade has moved what it replaces. A test vehicle only: nothing outside tests imports it.
"""

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}
CONVERSIONS = (
    "cast_impl",
    "create_fp_trunc",
    "create_fp_ext",
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_to_fp",
)


def scalar_type(dtype: tl.dtype) -> tl.dtype:
    return dtype.scalar if hasattr(dtype, "scalar") else dtype


def is_bfloat16(handle: Handle) -> bool:
    return scalar_type(handle.dtype) == tl.bfloat16 and handle.data.dtype == np.uint16


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 patterns are the upper halves of float32 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 patterns, to nearest even, NaN kept: torch does exactly that."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return tensor.to(torch.bfloat16).view(torch.uint16).numpy()


def widen(handle: Handle) -> np.ndarray:
    """A handle's values as numpy can compute with them."""
    kind = scalar_type(handle.dtype)
    if is_bfloat16(handle):
        return widen_bfloat16(handle.data)
    if kind in FLOAT8 and handle.data.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(handle.data)).view(FLOAT8[kind]).float().numpy()
    return handle.data


def convert(handle: Handle, dtype: tl.dtype) -> Handle:
    kind = scalar_type(dtype)
    values = widen(handle)
    if kind == tl.bfloat16:
        return Handle(narrow_bfloat16(values.astype(np.float32)), kind)
    if kind in FLOAT8:
        narrow = FLOAT8[kind]
        tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        largest = torch.finfo(narrow).max
        return Handle(tensor.clamp(-largest, largest).to(narrow).view(torch.uint8).numpy(), kind)
    return Handle(values.astype(interpreter._get_np_dtype(kind)), kind)


def _as_float32(handle: Handle) -> Handle:
    return Handle(widen_bfloat16(handle.data), tl.float32) if is_bfloat16(handle) else handle


def _patch_conversion(name: str) -> None:
    original: Callable[..., Handle] = getattr(Builder, name)

    def converted(self: Builder, source: Handle, dtype: tl.dtype, *rest: object) -> Handle:
        kinds = (scalar_type(source.dtype), scalar_type(dtype))
        special = tl.bfloat16 in kinds or any(kind in FLOAT8 for kind in kinds)
        return convert(source, dtype) if special else original(self, source, dtype, *rest)

    setattr(Builder, name, converted)


def install() -> None:
    """Replace the builder's methods; once per process."""
    binary, unary, dot, fma = Builder.binary_op, Builder.unary_op, Builder.create_dot, Builder.create_fma

    def binary_op(self: Builder, left: Handle, right: Handle, op: Callable) -> Handle:
        if is_bfloat16(left) or is_bfloat16(right):
            result = op(_as_float32(left).data, _as_float32(right).data)
            return Handle(result, tl.int1) if result.dtype == np.bool_ else Handle(narrow_bfloat16(result), tl.bfloat16)
        handle = binary(self, left, right, op)
        # Comparisons yield masks; the interpreter types them by their left operand.
        return Handle(handle.data.astype(np.bool_), tl.int1) if op in COMPARISONS else handle

    def unary_op(self: Builder, operand: Handle, op: Callable) -> Handle:
        if is_bfloat16(operand):
            return Handle(narrow_bfloat16(op(widen_bfloat16(operand.data))), tl.bfloat16)
        return unary(self, operand, op)

    def create_dot(self: Builder, a: Handle, b: Handle, c: Handle, *rest: object) -> Handle:
        return dot(self, _as_float32(a), _as_float32(b), c, *rest)

    def create_fma(self: Builder, x: Handle, y: Handle, z: Handle) -> Handle:
        if is_bfloat16(x):
            product = widen_bfloat16(x.data) * widen_bfloat16(y.data) + widen_bfloat16(z.data)
            return Handle(narrow_bfloat16(product), tl.bfloat16)
        return fma(self, x, y, z)

    Builder.binary_op, Builder.unary_op = binary_op, unary_op
    Builder.create_dot, Builder.create_fma = create_dot, create_fma
    for name in CONVERSIONS:
        if hasattr(Builder, name):
            _patch_conversion(name)

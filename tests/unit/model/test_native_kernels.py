"""The matrix kernel against sums in float64: every block shape, segments, accumulation, lengths that fill no vector."""

import ctypes
import shutil

import numpy as np
import pytest

from executor_svc.model import native

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
PANEL, PAIR, SEED = 16, 32, 20261129
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 25, 32)


@pytest.fixture(scope="module")
def engine() -> native.Engine:
    engine = native.load_engine(None, 1)
    assert isinstance(engine, native.Engine), engine
    return engine


def bf16(x: np.ndarray) -> np.ndarray:
    """uint16 bits, rounded to nearest even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def left_side(engine: native.Engine, kind: int, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[rows, k] as the kernel reads it, and the numbers that it stands for."""
    if kind == native.INT8:
        integers = a.astype(np.int16)
        return integers.reshape(len(a), -1, 4)[:, :, [0, 2, 1, 3]].reshape(len(a), -1).copy(), integers
    if kind == native.BF16 and engine.pairs:
        return bf16(a), widen(bf16(a))
    return a.astype(np.float32), a.astype(np.float32)


def right_side(kind: int, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[k, columns] as words [word, column], and the numbers that they stand for."""
    if kind == native.F32:
        return b.astype(np.float32).view(np.uint32), b.astype(np.float32)
    stored = bf16(b) if kind == native.BF16 else b.astype(np.int8)
    per = 4 // stored.itemsize
    words = stored.reshape(-1, per, b.shape[1]).swapaxes(1, 2).copy().view(np.uint32)[:, :, 0]
    return words, widen(stored) if kind == native.BF16 else stored


def multiply(
    engine, kind: int, a, words, rows: int, panels: int, segments: int, c: np.ndarray, accumulate: bool
) -> None:
    """Panels lie side by side in pairs, a segment after another, each at an address of its own."""
    per_segment = len(words) // segments
    blocks, pointers = [], (ctypes.c_void_p * (panels * segments))()
    for s in range(segments):
        for p in range(0, panels, 2):
            block = np.zeros((per_segment, PAIR), np.uint32)
            part = words[s * per_segment : (s + 1) * per_segment, p * PANEL : (p + 2) * PANEL]
            block[:, : part.shape[1]] = part
            blocks.append(block)
            for q in range(p, min(p + 2, panels)):
                pointers[s * panels + q] = block.ctypes.data + (q - p) * PANEL * 4
    engine.library.begin_tiles()
    engine.library.multiply(
        *(ctypes.c_int(kind), ctypes.c_void_p(a.ctypes.data), ctypes.c_int(a.strides[0] // 4), ctypes.c_int(rows)),
        *(pointers, ctypes.c_int(panels), ctypes.c_int(segments), ctypes.c_int(per_segment), ctypes.c_int(PAIR)),
        *(ctypes.c_void_p(c.ctypes.data), ctypes.c_int(c.strides[0] // 4), ctypes.c_int(accumulate), None),
    )
    engine.library.end_tiles()


@pytest.mark.parametrize("kind", [native.F32, native.BF16, native.INT8])
@pytest.mark.parametrize(("k", "segments"), [(32, 1), (96, 3), (160, 1), (576, 1)])
def test_products(engine, kind, k, segments):
    if kind == native.INT8 and engine.pairs:
        pytest.skip("bytes become bfloat16 before they get here")
    draw = np.random.default_rng([SEED, kind, k])
    for panels in (1, 2, 3, 4):
        b = (
            draw.integers(-127, 128, (k, panels * PANEL))
            if kind == native.INT8
            else draw.normal(size=(k, panels * PANEL))
        )
        words, right = right_side(kind, b)
        for rows in ROWS:
            a = draw.integers(-20_000, 20_001, (32, k)) if kind == native.INT8 else draw.normal(size=(32, k))
            laid, left = left_side(engine, kind, a)
            for accumulate in (False, True):
                c = np.full((32, 64), 3.0, np.float32)
                if kind == native.INT8:
                    c.view(np.int32)[:] = 7
                multiply(engine, kind, laid, words, rows, panels, segments, c, accumulate)
                expected = left[:rows].astype(np.float64) @ right.astype(np.float64)
                found = c[:rows, : panels * PANEL]
                where = f"{rows} rows, {panels} panels, accumulate {accumulate}"
                if kind == native.INT8:
                    assert np.array_equal(found.view(np.int32), expected + 7 * accumulate), where
                else:
                    size = np.abs(left[:rows]).astype(np.float64) @ np.abs(right).astype(np.float64)
                    assert (np.abs(found - expected - 3 * accumulate) <= 2e-6 * size + 1e-6).all(), where


@pytest.mark.parametrize("kind", [native.F32, native.BF16, native.INT8])
def test_a_row_has_the_same_bits_in_every_block(engine, kind):
    if kind == native.INT8 and engine.pairs:
        pytest.skip("bytes become bfloat16 before they get here")
    draw = np.random.default_rng([SEED, kind])
    words, _ = right_side(kind, draw.normal(size=(192, 64)) * 40)
    laid, _ = left_side(engine, kind, draw.normal(size=(32, 192)) * 40)
    whole = np.zeros((32, 64), np.float32)
    multiply(engine, kind, laid, words, 32, 4, 1, whole, False)
    for rows in ROWS:
        for panels in (1, 2, 4):
            c = np.zeros((32, 64), np.float32)
            multiply(engine, kind, laid, words[:, : panels * PANEL], rows, panels, 1, c, False)
            found = c[:rows, : panels * PANEL].view(np.uint32)
            assert np.array_equal(found, whole[:rows, : panels * PANEL].view(np.uint32)), (
                f"{rows} rows, {panels} panels"
            )

"""Many unfiltered draws at once: a compiled scan for tokens that may win, on all cores, then the exact race in numpy.

Draws what sampler.py draws without it, to the token. Where there is no C compiler, `load_race` says why and the caller
goes on without. Knows no parameters but the temperature.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from executor_svc.model.native import cpu_flags
from executor_svc.noise import draw_bits, exponential, mixed_ids

SOURCE = Path(__file__).with_name("native") / "race.c"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 60
# The scan is in float32; this covers its rounding and the polynomial's error many times.
MARGIN = 1 + 1e-5
# Fewer rows than these are not worth waking a thread for.
ROWS_PER_THREAD = 4
ROOM = 4  # whole vocabularies that one thread's buffers hold

Contenders = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids int32, log weights float32, bits uint32


class Race:
    def __init__(self, library: ctypes.CDLL, vocab_size: int, num_threads: int):
        self._scan = library.race_contenders
        self._vocab_size = vocab_size
        self._base = mixed_ids(vocab_size)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="race")
        size = ROOM * vocab_size
        self._buffers = [
            (np.empty(size, np.int32), np.empty(size, np.float32), np.empty(size, np.uint32))
            for _ in range(num_threads)
        ]

    def draw(self, rows: list[np.ndarray], best: np.ndarray, temperatures: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """int32 [n]: one token a row. rows: contiguous float32 [vocab_size] each; best [n]: a token with the largest
        logit of its row; temperatures float32 [n], above 0; keys uint64 [n]."""
        largest = np.array([row[token] for row, token in zip(rows, best.tolist(), strict=True)], np.float32)
        limits = exponential(draw_bits(self._base[best], keys)) * (2.0**32 * MARGIN)
        arguments = (
            np.array([row.ctypes.data for row in rows], np.uint64),
            largest,
            np.ascontiguousarray(temperatures, np.float32),
            keys,
            limits.astype(np.float32),
        )
        parts = min(self._num_threads, -(-len(rows) // ROWS_PER_THREAD))
        edges = [len(rows) * part // parts for part in range(parts + 1)]
        others = [
            self._threads.submit(self._part, arguments, edges[part], edges[part + 1], self._buffers[part])
            for part in range(1, parts)
        ]
        winners = [self._part(arguments, 0, edges[1], self._buffers[0]), *(other.result() for other in others)]
        return np.concatenate(winners)

    def _part(self, arguments: tuple[np.ndarray, ...], begin: int, end: int, buffers: Contenders) -> np.ndarray:
        winners = np.empty(end - begin, np.int32)
        done = begin
        while done < end:
            mine = [column[done:end] for column in arguments]
            ends = np.empty(end - done, np.int64)
            count = self._scan(
                *(ctypes.c_void_p(mine[0].ctypes.data), ctypes.c_int64(end - done), ctypes.c_int64(self._vocab_size)),
                *(ctypes.c_void_p(column.ctypes.data) for column in mine[1:]),
                ctypes.c_void_p(self._base.ctypes.data),
                ctypes.c_int64(len(buffers[0])),
                *(ctypes.c_void_p(column.ctypes.data) for column in (*buffers, ends)),
            )
            _decide(buffers, ends[:count], winners[done - begin :])
            done += count
        return winners


def _decide(buffers: Contenders, ends: np.ndarray, winners: np.ndarray) -> None:
    """The race of each row's contenders, as in sampler.py."""
    ids, weights, bits = (column[: ends[-1]] for column in buffers)
    arrivals = np.log(exponential(bits)) - weights
    begin = 0
    for row, end in enumerate(ends.tolist()):
        winners[row] = ids[begin + int(np.argmin(arrivals[begin:end]))]
        begin = end


def load_race(
    cache_dir: Path, vocab_size: int, num_threads: int, notice: Callable[[str], None] = lambda _: None
) -> Race | None:
    """Compiled once per machine and source. None, and a notice why: there is no compiler, or it fails."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = cache_dir / f"race-{_digest(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        notice(f"sampling in numpy: the native race cannot be built ({type(error).__name__})")
        return None
    library.race_contenders.restype = ctypes.c_int64
    return Race(library, vocab_size, num_threads)


def _digest(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True
    )
    parts = [version.stdout, platform.machine(), *sorted(cpu_flags()), *FLAGS, SOURCE.read_text("utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Beside `path`, then renamed: two processes that start at once do no harm."""
    handle, built = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", built, str(SOURCE), "-lm"]
        subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)

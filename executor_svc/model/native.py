"""Compiles the native engine once per machine and source, loads it, and mirrors its structures.

The C sources lie in native/. Where no compiler exists, or it fails, `load_engine` says why and the caller goes on in
torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("native")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
F32, BF16, INT8, F16, I16 = range(5)
EMBED, NORM, LINEAR, ROPE, ATTENTION, QUANTISE, GATHER = range(7)
CODE_NAMES = ("embed", "norm", "linear", "rope", "attention", "quantise", "gather")
STORE, ADD, GLU = range(3)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
COMPILE_TIMEOUT_S = 300


class Op(ctypes.Structure):
    """engine.h: Op."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("code", "kind", "epilogue", "activation")),
        *((name, ctypes.c_int32) for name in ("source", "target", "row_scale", "layer", "few", "target_kind")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale")),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("rope_dim", "window")),
        *((name, ctypes.c_float) for name in ("epsilon", "factor", "softcap", "unused")),
    )


class Buffer(ctypes.Structure):
    """engine.h: Buffer."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64))


class Step(ctypes.Structure):
    """engine.h: Step."""

    _fields_ = (
        *(
            (n, ctypes.c_void_p)
            for n in ("token_ids", "positions", "cu_seqlens", "seq_lens", "block_tables", "logits_index")
        ),
        *((n, ctypes.c_void_p) for n in ("slot_mapping", "key_pages", "value_pages", "buffers")),
        *(
            (n, ctypes.c_int64)
            for n in ("num_tokens", "num_rows", "num_logits", "table_stride", "block_size", "num_blocks")
        ),
        *((n, ctypes.c_int64) for n in ("num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")),
        *((n, ctypes.c_int64) for n in ("kv_kind", "full_norm", "num_threads")),
        ("nanoseconds", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Engine:
    """The loaded library."""

    library: ctypes.CDLL
    name: str  # the instructions it uses, for the log
    pairs: bool  # matrices of bfloat16 and of bytes are multiplied by bfloat16; else by floats and by 16-bit integers


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU as Linux names them; empty where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        return frozenset()
    return frozenset()


def has_fast_bf16() -> bool:
    """Does this CPU multiply bfloat16?"""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


def prefers_bf16() -> bool:
    """Is bfloat16 the fastest type here? Where the CPU multiplies it, and where the engine widens it on the way."""
    return has_fast_bf16() or ({"avx2", "fma"} <= cpu_flags() and find_compiler() is not None)


def find_compiler() -> str | None:
    """A C compiler, if there is one."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def load_engine(
    cache_dir: Path | None, num_threads: int, notice: Callable[[str], None] = lambda _: None
) -> Engine | str:
    """The engine, compiled if the cache lacks it, or the reason why there is none. `notice` hears of slow work."""
    compiler = find_compiler()
    if compiler is None:
        return "no C compiler found"
    directory = cache_dir or Path.home() / ".cache" / "stepwire" / "native"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / f"engine-{_digest(compiler)}.so"
        if not path.exists():
            notice("compiling the native engine, once on this machine")
            _compile(compiler, path)
        library = ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.strip().splitlines()[0] if error.stderr.strip() else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the native engine cannot be built: {error}"
    library.engine_run.restype = ctypes.c_char_p
    library.engine_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    tiles = library.engine_start(ctypes.c_int(num_threads))
    if tiles < 0:
        return "threads cannot be started"
    flags = cpu_flags()
    vectors = next(
        (n for f, n in (("avx512_bf16", "AVX-512 BF16"), ("avx512f", "AVX-512"), ("avx2", "AVX2")) if f in flags),
        platform.machine(),
    )
    return Engine(library, "AMX" if tiles else vectors, pairs=bool(library.engine_pairs()))


def _digest(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True
    )
    parts = [version.stdout, platform.machine(), *sorted(cpu_flags()), *FLAGS]
    parts += [file.read_text(encoding="utf-8") for file in sorted(SOURCES.glob("*.[ch]"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compile(compiler: str, path: Path) -> None:
    """Build beside `path`, then rename, so that two processes starting at once do no harm."""
    handle, built = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        sources = [str(file) for file in sorted(SOURCES.glob("*.c"))]
        command = [compiler, *FLAGS, "-o", built, *sources, "-lm"]
        _run(command)
        os.replace(built, path)
    finally:
        Path(built).unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Like subprocess.run, and whatever the command started ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=COMPILE_TIMEOUT_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output, errors)

"""What the operator asks of the executor: one frozen object, read once from the command line and STEPWIRE_* variables.

The only module of this service that touches the environment. Knows nothing of models or devices: what `None` (decide
for me) becomes is said where it is decided, in geometry.py and the backends.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from executor_svc.errors import StartupError

PREFIX = "STEPWIRE_"

# Read by one service or another: one environment may serve them all. A test holds this to the scheduler's own list.
# fmt: off
_NAMES = (
    "ADDRESS", "API_KEY", "API_KEYS", "BACKEND", "BIND_BEAT", "BIND_EXECUTOR", "BIND_FRONTEND", "BLOCK_SIZE", "CACHE",
    "CONNECT", "CONNECT_BEAT", "CURVE_CLIENTS", "CURVE_SECRET", "CURVE_SERVER", "DRAIN_TIMEOUT", "DTYPE",
    "ENABLE_PREFIX_CACHING", "FRONTENDS", "GPU_MEMORY_UTILIZATION", "HOST", "INSECURE_WIRE", "INTER_TOKEN_TARGET",
    "JOURNAL", "JOURNAL_LIMIT", "JOURNAL_UNMASKED", "KV_DTYPE", "KV_MEMORY", "LOG_FORMAT", "LOG_LEVEL",
    "MAX_EXECUTOR_DEATHS", "MAX_MODEL_LEN", "MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS", "MAX_WAIT", "MAX_WAITING",
    "MAX_WAITING_PER_TENANT", "MAX_WAITING_TOKENS", "MAX_WAITING_TOKENS_PER_TENANT", "METRICS_HOST", "METRICS_PORT",
    "MODEL", "NUM_BLOCKS", "PARENT_PID", "PIPELINE_DEPTH", "POLICY", "PORT", "READY_FILE", "RESTART_LIMIT",
    "RESTART_WINDOW", "RESUME_LIMIT", "RUNTIME_DIR", "SERVED_MODEL_NAME", "SILENCE_LIMIT", "SIM_FAULT", "SIM_KV_US",
    "SIM_STEP_US", "SIM_TOKEN_US", "SIM_VOCAB_SIZE", "STEP_TIMEOUT", "THREADS", "TLS_CA", "TLS_CERT", "TLS_CLIENT_CA",
    "TLS_KEY", "TRACE_ENDPOINT", "VERBOSE",
)
# fmt: on
KNOWN_VARIABLES = frozenset(PREFIX + name for name in _NAMES)


class BackendChoice(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"
    SIMULATED = "simulated"


class Dtype(StrEnum):
    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    INT8 = "int8"


class KVDtype(StrEnum):
    AUTO = "auto"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class SizeSettings:
    """Counts of blocks, rows and tokens, and bytes. None: measured or derived."""

    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    vocab_size: int | None = None  # None: the model directory's
    step_us: float = 0.0
    token_us: float = 0.0
    kv_us: float = 0.0
    fault: str = ""  # injected_fault.py says how it is written


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    model: Path | None = None
    backend: BackendChoice = BackendChoice.AUTO
    dtype: Dtype = Dtype.AUTO
    kv_dtype: KVDtype = KVDtype.AUTO
    sizes: SizeSettings = SizeSettings()
    simulation: SimulationSettings = SimulationSettings()
    threads: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0  # 0: no endpoint


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """ "1.5GiB", "800MB", "4g", "123456" -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None:
        raise StartupError(f"--kv-memory {text!r} is not a size: write it like 512MiB or 4GiB")
    size = int(float(match[1]) * _UNITS[match[2] or ""])
    if size < 1:
        raise StartupError(f"--kv-memory {text!r} must be at least one byte")
    return size


def check_environment(own: frozenset[str]) -> None:
    """A misspelt variable would be ignored silently."""
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in own | KNOWN_VARIABLES)
    if unknown:
        raise StartupError(f"unknown environment variable {unknown[0]}: unset it, --help names the STEPWIRE_ variables")


def prepare_environment() -> None:
    """Before torch is imported: its threads must sleep, not spin, while they wait for each other.

    With one other busy process on two cores, spinning makes a small linear a hundred times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def cache_directory() -> Path:
    """Where compiled code is kept between starts."""
    own = os.environ.get(PREFIX + "CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepwire"


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

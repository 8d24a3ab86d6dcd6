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

# Variables of the other services: one environment may be shared by all of them.
OTHER_SERVICES = frozenset(
    PREFIX + name
    for name in [
        "SERVED_MODEL_NAME",
        "HOST",
        "PORT",
        "FRONTENDS",
        "MAX_WAITING",
        "MAX_WAITING_TOKENS",
        "POLICY",
        "PIPELINE_DEPTH",
        "PREFIX_CACHING",
        "ENABLE_PREFIX_CACHING",
        "DRAIN_TIMEOUT",
        "TLS_CERT",
        "TLS_KEY",
        "TLS_CLIENT_CA",
        "API_KEYS",
        "METRICS_HOST",
        "METRICS_PORT",
        "JOURNAL",
        "RUNTIME_DIR",
        "CACHE",
        "BIND_FRONTEND",
        "BIND_EXECUTOR",
        "BIND_BEAT",
        "FRONTEND",
        "CURVE_CLIENTS",
        "LOG_LEVEL",
    ]
)


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


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    model: Path | None = None
    backend: BackendChoice = BackendChoice.AUTO
    dtype: Dtype = Dtype.AUTO
    kv_dtype: KVDtype = KVDtype.AUTO
    sizes: SizeSettings = SizeSettings()
    simulation: SimulationSettings = SimulationSettings()
    threads: int | None = None


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str) -> int:
    """ "1.5GiB", "800MB", "4g", "123456" -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text.lower())
    if match is None:
        raise StartupError(f"--kv-memory {text!r} is not a size: write it like 512MiB or 4GiB")
    size = int(float(match[1]) * _UNITS[match[2] or ""])
    if size < 1:
        raise StartupError(f"--kv-memory {text!r} must be at least one byte")
    return size


def check_environment(own: frozenset[str]) -> None:
    """A misspelt variable would be ignored silently."""
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in own | OTHER_SERVICES)
    if unknown:
        raise StartupError(f"unknown variable {unknown[0]}: see --help for the STEPWIRE_* variables of each option")


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

"""Which backend, by name or by what the machine has. Imports torch only where a backend needs it."""

import ctypes
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from executor_svc.backends.base import Backend
from executor_svc.backends.injected_fault import InjectedFault
from executor_svc.backends.simulated import SLOT_BYTES, SimulatedBackend, StepTime
from executor_svc.config import BackendChoice, ExecutorConfig
from executor_svc.errors import StartupError
from executor_svc.geometry import Defaults, Memory, size_pool
from executor_svc.identity import fingerprint, read_config
from executor_svc.memory import available_memory
from executor_svc.startup import Startup
from protos.stepwire.wire.v1 import step_pb2

NVIDIA_DRIVER = "libcuda.so.1"
AMD_DEVICE = Path("/dev/kfd")
SIMULATED_DEFAULTS = Defaults(block_size=16, max_num_seqs=256, max_num_batched_tokens=2048)
SIMULATED_NUM_BLOCKS = 8192
SIMULATED_MAX_POSITION = 8192
SIMULATED_VOCAB_SIZE = 32_000


def make_backend(config: ExecutorConfig, startup: Startup) -> Backend:
    """Builds the backend, weights and KV pool included."""
    choice = config.backend
    if choice is BackendChoice.SIMULATED:
        return make_simulated(config, startup)
    if config.model is None:
        raise StartupError(f"--backend {choice} needs --model DIR, a directory with config.json and safetensors")
    if not config.model.is_dir():
        raise StartupError(f"--model {config.model} is not a directory")
    if find_spec("torch") is None:
        raise StartupError(
            "the cpu and cuda backends need torch: install stepwire[executor], or use --backend simulated"
        )
    if choice is BackendChoice.AUTO:
        choice = BackendChoice.CUDA if _has_gpu() else BackendChoice.CPU
        startup.note(f"backend {choice}")
    if choice is BackendChoice.CUDA:
        return _make_cuda(config, startup)
    from executor_svc.backends.cpu import make_cpu

    return make_cpu(config, startup)


def _has_gpu() -> bool:
    """As torch says, which is asked only where a driver is: importing it takes longer than the rest of a start."""
    if not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_driver() -> bool:
    """Without NVIDIA's library, or AMD's device, torch finds no GPU."""
    try:
        ctypes.CDLL(NVIDIA_DRIVER)
    except OSError:
        return AMD_DEVICE.exists()
    return True


def _make_cuda(config: ExecutorConfig, startup: Startup) -> Backend:
    import torch

    if not torch.cuda.is_available():
        raise StartupError("--backend cuda: torch finds no CUDA device; use --backend cpu, or auto")
    try:
        from executor_svc.backends.cuda import make_cuda
    except ModuleNotFoundError as error:
        raise StartupError(f"--backend cuda cannot be loaded: {error}; use --backend cpu") from None
    return make_cuda(config, startup)


def make_simulated(config: ExecutorConfig, startup: Startup) -> SimulatedBackend:
    described = read_config(config.model) if config.model is not None else {}
    settings = config.simulation
    vocab_size = settings.vocab_size or _integer(described, "vocab_size") or SIMULATED_VOCAB_SIZE
    max_position = (
        _integer(described, "max_position_embeddings") or config.sizes.max_model_len or SIMULATED_MAX_POSITION
    )
    sizes = config.sizes
    if sizes.num_blocks is None and sizes.kv_memory is None:
        sizes = replace(sizes, num_blocks=SIMULATED_NUM_BLOCKS)
    geometry = size_pool(
        sizes,
        SIMULATED_DEFAULTS,
        block_bytes=lambda block_size: block_size * SLOT_BYTES,
        memory=Memory(available_memory()),
        max_position=max_position,
        vocab_size=vocab_size,
        notice=startup.note,
    )
    architectures = described.get("architectures")
    identity = step_pb2.ModelIdentity(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "simulated",
        dtype="none",
        kv_dtype="int32",
        fingerprint=fingerprint(config.model),
    )
    step_time = StepTime(settings.step_us, settings.token_us, settings.kv_us)
    fault = InjectedFault.parse(settings.fault) if settings.fault else None
    return SimulatedBackend(geometry, identity, step_time, fault)


def _integer(described: dict, name: str) -> int | None:
    value = described.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StartupError(f"config.json: {name} is {value!r}, expected a positive integer")
    return value

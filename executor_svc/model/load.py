"""From a model directory to the decoder that runs it best here: the native engine, torch, or transformers' modules.

torch is imported only where it computes, or where weights are dequantised.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from executor_svc.model import native
from executor_svc.model.borrowed import Description, describe
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig, architecture_of, read_config
from executor_svc.model.decoder import Decoder
from executor_svc.model.families import FAMILIES
from executor_svc.model.native_decoder import NativeDecoder, unsupported
from executor_svc.model.weights import Progress, WeightSource

WeightType = Literal["float32", "bfloat16", "float16", "int8"]

_KINDS = {"float32": native.F32, "bfloat16": native.BF16, "int8": native.INT8}


@dataclass(frozen=True)
class Choice:
    """What computes a model here, and in which type."""

    dtype: WeightType
    engine: native.Engine | str  # why not the native engine
    num_threads: int


def read_model(path: str | Path) -> ModelConfig | Description:
    """What the model in `path` is: an architecture of our table, or one that transformers computes."""
    raw, source = read_config(path), str(Path(path) / "config.json")
    if architecture_of(raw, source) in FAMILIES:
        return ModelConfig.from_directory(path)
    return describe(raw, source)


def computed_type(config: ModelConfig | Description, dtype: WeightType | Literal["auto"]) -> WeightType:
    """What the weights will be in where `dtype` was asked for and the engine, if it can run the model, is there.

    "auto" is the fastest type: bfloat16 halves the memory traffic, but only the native engine widens it well on a CPU
    that does not multiply it. int8 is the engine's alone.
    """
    can_run = isinstance(config, ModelConfig) and unsupported(config) is None
    if dtype == "auto":
        return "bfloat16" if can_run and native.prefers_bf16() else _wide_type()
    return dtype if can_run or dtype != "int8" else _wide_type()


def choose(
    config: ModelConfig | Description,
    dtype: WeightType | Literal["auto"] = "auto",
    *,
    num_threads: int = 0,
    cache_dir: Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    use_native: bool = True,
) -> Choice:
    """What will compute `config`. `num_threads` 0: every core this process may use. The compiled engine is kept in
    `cache_dir`; `notice` hears when it is made. `use_native` False forces torch."""
    num_threads = num_threads or len(os.sched_getaffinity(0))
    wanted = computed_type(config, dtype)
    if isinstance(config, Description):
        return Choice(wanted, "not in our table", num_threads)
    reason = "not wanted" if not use_native else unsupported(config)
    if reason is None and wanted not in _KINDS:
        reason = f"{wanted} weights"
    engine = reason or native.load_engine(cache_dir, num_threads, notice)
    if isinstance(engine, str) and wanted == "int8":
        wanted = _wide_type()
    return Choice(wanted, engine, num_threads)


def load_model(
    path: str | Path,
    config: ModelConfig | Description,
    *,
    dtype: WeightType | Literal["auto"] = "auto",
    progress: Progress | None = None,
    num_threads: int = 0,
    cache_dir: Path | None = None,
    use_native: bool = True,
) -> Decoder:
    """The decoder for the model in `path`, on the CPU, by what `choose` says."""
    chosen = choose(config, dtype, num_threads=num_threads, cache_dir=cache_dir, use_native=use_native)
    return load_chosen(path, config, chosen, progress)


def load_chosen(
    path: str | Path, config: ModelConfig | Description, chosen: Choice, progress: Progress | None = None
) -> Decoder:
    """The decoder for the model in `path`, on the CPU."""
    engine = chosen.engine
    if isinstance(engine, native.Engine):
        assert isinstance(config, ModelConfig)
        source = WeightSource(Checkpoint(path), config)
        kind = _KINDS[chosen.dtype]
        return NativeDecoder(source, engine, kind=kind, num_threads=chosen.num_threads, progress=progress)
    import torch

    torch.set_num_threads(chosen.num_threads)
    dtype = getattr(torch, chosen.dtype)
    if isinstance(config, Description):
        from executor_svc.model.borrowed.load import load_borrowed

        return load_borrowed(path, config, dtype)
    from executor_svc.model.torch_decoder import TorchDecoder

    decoder = TorchDecoder(WeightSource(Checkpoint(path), config), dtype=dtype, progress=progress)
    decoder.description += f" (no native engine: {engine})"
    return decoder


def _wide_type() -> WeightType:
    """What torch itself is fast in."""
    return "bfloat16" if native.has_fast_bf16() else "float32"

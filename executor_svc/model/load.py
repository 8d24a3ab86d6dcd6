"""From a model directory to the decoder that runs it best here: the native engine, torch, or transformers' modules."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from executor_svc.model import native
from executor_svc.model.borrowed import Description, describe, load_borrowed
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig, architecture_of, read_config
from executor_svc.model.decoder import Decoder, TorchDecoder
from executor_svc.model.families import FAMILIES
from executor_svc.model.native_decoder import NativeDecoder, unsupported
from executor_svc.model.weights import Progress, WeightSource

WeightType = torch.dtype | Literal["int8"]

_KINDS = {torch.float32: native.F32, torch.bfloat16: native.BF16, "int8": native.INT8}


def read_model(path: str | Path) -> ModelConfig | Description:
    """What the model in `path` is: an architecture of our table, or one that transformers computes."""
    raw, source = read_config(path), str(Path(path) / "config.json")
    if architecture_of(raw, source) in FAMILIES:
        return ModelConfig.from_directory(path)
    return describe(raw, source)


def computed_type(config: ModelConfig | Description, dtype: WeightType | Literal["auto"]) -> WeightType:
    """What the weights will be in where `dtype` was asked for.

    "auto" is the fastest type: bfloat16 halves the memory traffic, but only the native engine widens it well on a CPU
    that does not multiply it. int8 is for our own decoders.
    """
    if isinstance(config, Description):
        return dtype if isinstance(dtype, torch.dtype) else _wide_type()
    if dtype == "auto":
        return torch.bfloat16 if unsupported(config) is None and native.prefers_bf16() else _wide_type()
    return dtype


def load_model(
    path: str | Path,
    config: ModelConfig | Description,
    *,
    dtype: WeightType | Literal["auto"] = "auto",
    progress: Progress | None = None,
    num_threads: int = 0,
    cache_dir: Path | None = None,
    notice: Callable[[str], None] = lambda _: None,
    use_native: bool = True,
) -> Decoder:
    """The decoder for the model in `path`, on the CPU.

    dtype "auto" is as `computed_type` says. `num_threads` 0 means every core this
    process may use. The compiled engine is kept in `cache_dir`; `notice` hears when it is made. `use_native` False
    forces torch.
    """
    dtype = computed_type(config, dtype)
    if isinstance(config, Description):
        assert isinstance(dtype, torch.dtype)
        return load_borrowed(path, config, dtype)
    num_threads = num_threads or len(os.sched_getaffinity(0))
    reason = "not wanted" if not use_native else unsupported(config)
    if reason is None and dtype not in _KINDS:
        reason = f"{dtype} weights"
    engine = reason or native.load_engine(cache_dir, num_threads, notice)
    source = WeightSource(Checkpoint(path), config)
    if not isinstance(engine, str):
        return NativeDecoder(source, engine, kind=_KINDS[dtype], num_threads=num_threads, progress=progress)
    if dtype == "int8":
        dtype = _wide_type()
        engine += "; int8 needs it"
    decoder = TorchDecoder(source, dtype=dtype, progress=progress)
    decoder.description += f" (no native engine: {engine})"
    return decoder


def _wide_type() -> torch.dtype:
    """What torch itself is fast in."""
    return torch.bfloat16 if native.has_fast_bf16() else torch.float32

"""What a CUDA device's memory is spent on: the widest step is run once and measured, what our share has left is KV
blocks.

    free ─┬─ the share that is not ours ─┬─ the widest step ─┬─ graphs, libraries ─┬─ KV blocks

The pool is allocated once, after that; nothing grows while serving. Weights are loaded by then, so they are not free.
"""

import gc
from collections.abc import Callable

import torch

from executor_svc.config import SizeSettings
from executor_svc.errors import StartupError
from executor_svc.geometry import GIB, Defaults, show_bytes
from executor_svc.model.config import ModelConfig
from kernels.paged import QUANT_LIMIT, PagedKV
from protos.stepwire.wire.v1 import step_pb2

# What the measured step does not show: recorded graphs, workspaces of the libraries, the context's growth.
SET_ASIDE = GIB


def draft_geometry(sizes: SizeSettings, defaults: Defaults, model: ModelConfig) -> step_pb2.Geometry:
    """The largest step that the options allow, over a pool of one block."""
    return step_pb2.Geometry(
        num_blocks=1,
        block_size=sizes.block_size or defaults.block_size,
        max_num_seqs=sizes.max_num_seqs or defaults.max_num_seqs,
        max_model_len=min(sizes.max_model_len or model.max_position, model.max_position),
        max_num_batched_tokens=sizes.max_num_batched_tokens or defaults.max_num_batched_tokens,
        vocab_size=model.vocab_size,
    )


def step_bytes(run: Callable[[], object]) -> int:
    """Device memory that `run` needs at its peak, beyond what is allocated now; given back afterwards."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() - before
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def kv_budget(free: int, total: int, *, working: int, utilization: float) -> int:
    """Bytes for KV blocks. `free` of `total` are; a step takes `working` at its peak; `utilization` in (0, 1]."""
    budget = free - int(total * (1 - utilization)) - working - SET_ASIDE
    if budget <= 0:
        raise StartupError(
            f"{show_bytes(free)} of device memory are free, {show_bytes(working + SET_ASIDE)} are needed to compute "
            f"and --gpu-memory-utilization {utilization} leaves nothing for the KV cache: raise it, or lower "
            "--max-num-batched-tokens, --max-num-seqs or --max-model-len"
        )
    return budget


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Of one block over all layers, scales included."""
    vectors = 2 * model.num_layers * block_size * model.num_kv_heads
    return vectors * (model.head_dim * dtype.itemsize + (4 if dtype in QUANT_LIMIT else 0))


def make_kv(model: ModelConfig, geometry: step_pb2.Geometry, dtype: torch.dtype, where: torch.device) -> list[PagedKV]:
    """One cache per layer, zeroed, so that what warm-up reads is a number."""
    shape = (geometry.num_blocks, geometry.block_size, model.num_kv_heads, model.head_dim)
    layers = [PagedKV.empty(shape, dtype, where) for _ in range(model.num_layers)]
    for layer in layers:
        layer.cache.zero_()
        if layer.scale is not None:
            layer.scale.zero_()
    return layers

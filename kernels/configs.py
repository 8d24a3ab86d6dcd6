"""Tile sizes and warps, per architecture: a table instead of an autotuner, so that what runs is what was compiled in
review.

Each entry is checked by `python -m kernels.aot`: no spills, 16-byte accesses, shared memory within the architecture.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """`block_m` query rows of one program (prefill), `tile` keys of one inner step."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


# Which table a device uses: the newest architecture not newer than it.
ARCHITECTURES = (80, 90, 100)

# (architecture, kernel, head size up to, bytes of a cached element) -> config.
_ATTENTION = {
    (80, "prefill", 64, 2): AttentionConfig(128, 64, 8, 3),
    (80, "prefill", 128, 2): AttentionConfig(128, 64, 8, 3),
    (80, "prefill", 256, 2): AttentionConfig(64, 32, 8, 2),
    (90, "prefill", 64, 2): AttentionConfig(128, 64, 8, 3),
    (90, "prefill", 128, 2): AttentionConfig(128, 64, 8, 3),
    (90, "prefill", 256, 2): AttentionConfig(64, 32, 8, 2),
    (100, "prefill", 64, 2): AttentionConfig(128, 64, 8, 3),
    (100, "prefill", 128, 2): AttentionConfig(128, 64, 8, 3),
    (100, "prefill", 256, 2): AttentionConfig(64, 32, 8, 2),
}
_DECODE = {64: AttentionConfig(16, 64, 4, 3), 128: AttentionConfig(16, 64, 4, 2), 256: AttentionConfig(16, 32, 4, 2)}


@cache
def device_architecture() -> int:
    """Compute capability as one number (90 is Hopper); 0 where there is no device and kernels are interpreted."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def prefill_config(head_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
    return AttentionConfig(64, 64, 4, 2)


def decode_config(head_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
    return AttentionConfig(16, 64, 4, 2)

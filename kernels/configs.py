"""Tile sizes and warps, per architecture: a table instead of an autotuner, so that what runs is what was reviewed.

Each entry is checked by `python -m kernels.aot`: no spills, 16-byte accesses, shared memory within the architecture.
"""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class AttentionConfig:
    """`block_m` query rows of one program (decode pads its group to it), `tile` keys of one inner step."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


# Tables exist for these; a device uses the newest that is not newer than itself.
ARCHITECTURES = (80, 90, 100)
INTERPRETER = 0

# kernel -> {(head size up to, bytes of a cached element): config}; exceptions by architecture below.
_ATTENTION = {
    "prefill": {
        (64, 1): AttentionConfig(128, 64, 8, 3),
        (64, 2): AttentionConfig(128, 64, 8, 3),
        (64, 4): AttentionConfig(64, 32, 8, 2),
        (128, 1): AttentionConfig(128, 64, 8, 3),
        (128, 2): AttentionConfig(128, 64, 8, 3),
        (128, 4): AttentionConfig(64, 32, 8, 2),
        (256, 1): AttentionConfig(64, 32, 8, 2),
        (256, 2): AttentionConfig(64, 32, 8, 2),
        (256, 4): AttentionConfig(32, 16, 8, 2),
    },
    "decode": {
        (64, 1): AttentionConfig(16, 64, 4, 3),
        (64, 2): AttentionConfig(16, 64, 4, 3),
        (64, 4): AttentionConfig(16, 32, 4, 2),
        (128, 1): AttentionConfig(16, 64, 4, 2),
        (128, 2): AttentionConfig(16, 64, 4, 2),
        (128, 4): AttentionConfig(16, 32, 4, 2),
        (256, 1): AttentionConfig(16, 32, 4, 2),
        (256, 2): AttentionConfig(16, 32, 4, 2),
        (256, 4): AttentionConfig(16, 16, 4, 2),
    },
    # Few decoding rows over one shared prefix: prefill's shape, for as many rows as share.
    "shared": {
        (64, 1): AttentionConfig(64, 64, 4, 3),
        (64, 2): AttentionConfig(64, 64, 4, 3),
        (64, 4): AttentionConfig(64, 32, 8, 2),
        (128, 1): AttentionConfig(64, 64, 4, 2),
        (128, 2): AttentionConfig(64, 64, 4, 2),
        (128, 4): AttentionConfig(64, 32, 8, 2),
        (256, 1): AttentionConfig(64, 32, 8, 2),
        (256, 2): AttentionConfig(64, 32, 8, 2),
        (256, 4): AttentionConfig(32, 16, 8, 2),
    },
}
_EXCEPTIONS = {
    # Ampere accumulates in registers and converts bytes there: smaller tiles, or it spills.
    (80, "prefill", 128, 1): AttentionConfig(64, 64, 8, 2),
    (80, "prefill", 128, 2): AttentionConfig(128, 32, 8, 3),
    # Blackwell accumulates outside the registers: taller tiles cost less there than short ones, and four warps are
    # all that reach the accumulator; eight leave each thread too few registers.
    (100, "prefill", 64, 2): AttentionConfig(128, 64, 4, 3),
    (100, "prefill", 256, 2): AttentionConfig(128, 32, 8, 2),
    # With two stages the compiler allows itself 96 registers and spills the last one of a padded head.
    (80, "decode", 128, 2): AttentionConfig(16, 64, 4, 3),
    (100, "decode", 128, 2): AttentionConfig(16, 64, 4, 3),
}

# The interpreter's cost is per operation, hardly per element; and any tile must divide what the tests cut at.
_INTERPRETED = {
    "prefill": AttentionConfig(64, 64, 4, 2),
    "decode": AttentionConfig(16, 64, 4, 2),
    "shared": AttentionConfig(64, 64, 4, 2),
}


@cache
def device_architecture() -> int:
    """The table this device uses; INTERPRETER where there is no device."""
    if not torch.cuda.is_available():
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability()
    known = [arch for arch in ARCHITECTURES if arch <= major * 10 + minor]
    if not known:
        raise ValueError(f"kernels need compute capability {ARCHITECTURES[0] / 10}, this device has {major}.{minor}")
    return known[-1]


def attention_config(
    kernel: str, head_size: int, kv_dtype: torch.dtype, architecture: int | None = None
) -> AttentionConfig:
    """The entry for `kernel` (prefill, decode or shared) on this device, or on `architecture`."""
    arch = device_architecture() if architecture is None else architecture
    if arch == INTERPRETER:
        return _INTERPRETED[kernel]
    for bucket in (64, 128, 256):
        if head_size <= bucket:
            key = (bucket, kv_dtype.itemsize)
            return _EXCEPTIONS.get((arch, kernel, *key), _ATTENTION[kernel][key])
    raise ValueError(f"head size {head_size} is larger than 256")

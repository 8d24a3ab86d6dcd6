"""NVFP4: 4-bit floats (one sign bit, two of exponent, one of mantissa) with a scale of sixteen and one of them all."""

import torch

from executor_svc.model.checkpoint import FLOAT8, Checkpoint
from executor_svc.model.quantised.method import num_groups
from executor_svc.model.quantised.packing import dequantise, unpack

GROUP = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BYTES = frozenset({"U8"})


def take_nvfp4(module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
    """float32 [O, I]: value * weight_scale / weight_global_scale; two values a byte, the first in the low bits."""
    outputs, inputs = shape
    groups = num_groups(module, checkpoint, inputs, GROUP)
    packed = checkpoint.take(f"{module}.weight_packed", (outputs, inputs // 2), BYTES)
    scales = checkpoint.take(f"{module}.weight_scale", (outputs, groups), FLOAT8).float()
    whole = checkpoint.take(f"{module}.weight_global_scale", (1,)).float()
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    return dequantise(values[unpack(packed, 4).int()], scales / whole)

"""8-bit floats with scales: of the whole weight, of an output, or of a block (DeepSeek, Qwen, FBGEMM and others).

    weight float8_e4m3 [O, I]    weight_scale_inv or weight_scale float: one, [O], [O, 1] or [O / rows, I / columns]

weight = stored * scale, whichever name the scale has; blocks at the edges may be cut off.
"""

from dataclasses import dataclass

import torch

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import FLOAT8, Checkpoint
from executor_svc.model.quantised.method import Settings, matrix

SCALES = ("weight_scale_inv", "weight_scale")
MAX_BLOCK = 1 << 16


@dataclass(frozen=True)
class Fp8:
    block: tuple[int, int] | None  # outputs and inputs that share a scale; None: one scale, or one of each output
    name: str = "fp8"
    unused: tuple[str, ...] = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")

    @classmethod
    def read(cls, settings: Settings) -> "Fp8":
        settings.choice("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
        settings.choice("activation_scheme", "dynamic", "static", default="dynamic")
        return cls(read_block(settings, "weight_block_size"), settings.method)

    @property
    def summary(self) -> str:
        shared = (
            "one scale a weight or an output" if self.block is None else f"blocks of {self.block[0]}x{self.block[1]}"
        )
        return f"{self.name}, {shared}"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
        name = f"{module}.weight"
        return matrix(name, checkpoint) if checkpoint.kind(name) in FLOAT8 else None

    def weight(self, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
        name = next((f"{module}.{s}" for s in SCALES if f"{module}.{s}" in checkpoint), None)
        if name is None:
            raise StartupError(f"{checkpoint.directory}: {module}.weight is fp8, but there is no {module}.weight_scale")
        scales = take_scales(name, checkpoint, shape, self.block)
        return spread(checkpoint.take(f"{module}.weight", shape, FLOAT8).float(), scales, self.block)


def read_block(settings: Settings, field: str) -> tuple[int, int] | None:
    """Rows and columns of a block, each checked; None where the config names none."""
    value = settings.values.get(field)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= MAX_BLOCK for n in value)
    ):
        raise settings.refuse(field, value, f"two integers from 1 to {MAX_BLOCK}")
    return value[0], value[1]


def take_scales(
    name: str, checkpoint: Checkpoint, shape: tuple[int, int], block: tuple[int, int] | None
) -> torch.Tensor:
    """The scales of a weight of `shape`, as [rows, columns]: one, one of each output, or one of each block."""
    outputs, inputs = shape
    found = checkpoint.shape(name)
    single: set[tuple[int, ...]] = {(), (1,), (1, 1)}
    if block is not None:
        expected = (-(-outputs // block[0]), -(-inputs // block[1]))
        return checkpoint.take(name, expected).float()
    if found in single:
        return checkpoint.take(name, found).float().reshape(1, 1)
    expected_rows = (outputs,) if len(found) == 1 else (outputs, 1)
    return checkpoint.take(name, expected_rows).float().reshape(outputs, 1)


def spread(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """`weight` [O, I], multiplied in place by scales that broadcast, or by those of its blocks."""
    if block is None:
        return weight.mul_(scales)
    for row, of_columns in enumerate(scales.repeat_interleave(block[1], 1)):
        weight[row * block[0] : (row + 1) * block[0]] *= of_columns[: weight.shape[1]]
    return weight

"""AWQ: 4-bit weights in groups, as AutoAWQ's GEMM layout stores them.

    qweight int32 [I, O / 8]    scales float [G, O]    qzeros int32 [G, O / 8]        weight = (q - zero) * scale

Each int32 holds eight neighbouring outputs; its fields, lowest bits first, are outputs 0 2 4 6 1 3 5 7.
"""

from dataclasses import dataclass

import torch

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import INT32, Checkpoint
from executor_svc.model.quantised.method import Settings, matrix, num_groups
from executor_svc.model.quantised.packing import dequantise, unpack

BITS, FIELDS = 4, 8
PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # which field holds output 0, 1, ...


@dataclass(frozen=True)
class Awq:
    group_size: int
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, settings: Settings) -> "Awq":
        if "w_bit" in settings.values or "q_group_size" in settings.values:  # AutoAWQ's own spelling
            names = {"w_bit": "bits", "q_group_size": "group_size"}
            values = {names.get(name, name): value for name, value in settings.values.items()}
            settings = Settings(settings.method, values, settings.source)
        settings.choice("bits", BITS)
        settings.choice("version" if "version" in settings.values else "format", "gemm", "GEMM", default="gemm")
        settings.choice("backend", "autoawq", default="autoawq")
        settings.choice("zero_point", True, default=True)
        return cls(settings.group_size(default=128))

    @property
    def summary(self) -> str:
        return f"awq, {BITS} bits, groups of {self.group_size}"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
        packed = matrix(f"{module}.qweight", checkpoint)
        return packed and (packed[1] * FIELDS, packed[0])

    def weight(self, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
        outputs, inputs = shape
        if outputs % FIELDS:
            raise StartupError(f"{checkpoint.directory}: {module} has {outputs} outputs, no multiple of {FIELDS}")
        groups = num_groups(module, checkpoint, inputs, self.group_size)
        values = checkpoint.take(f"{module}.qweight", (inputs, outputs // FIELDS), INT32)
        zeros = checkpoint.take(f"{module}.qzeros", (groups, outputs // FIELDS), INT32)
        scales = checkpoint.take(f"{module}.scales", (groups, outputs))
        return dequantise(_outputs(values).t(), scales.t(), _outputs(zeros).t())


def _outputs(packed: torch.Tensor) -> torch.Tensor:
    """[n, O] in the order of outputs."""
    fields = unpack(packed, BITS).unflatten(-1, (-1, FIELDS))
    return fields[..., PLACE_OF_OUTPUT].flatten(-2)

"""GPTQ: weights of 2, 4 or 8 bits in groups, packed along the inputs, as AutoGPTQ and GPTQModel store them.

    qweight int32 [I * bits / 32, O]    scales float [G, O]    qzeros int32 [G, O * bits / 32]    g_idx int32 [I]

weight = (q - zero) * scale, with the zero and the scale of group g_idx[i]; groups are not consecutive where inputs were
quantised in another order (desc_act). "gptq" stores zero - 1, modulo 2^bits; "gptq_v2" stores the zero itself.
"""

from dataclasses import dataclass

import torch

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import INT32, Checkpoint
from executor_svc.model.quantised.method import Settings, matrix, num_groups
from executor_svc.model.quantised.packing import dequantise, unpack, unpack_columns


@dataclass(frozen=True)
class Gptq:
    bits: int
    group_size: int
    zero_offset: int  # what is missing in the stored zeros
    reordered: bool = False  # groups need not be consecutive
    unused: tuple[str, ...] = ()

    @classmethod
    def read(cls, settings: Settings) -> "Gptq":
        bits = settings.choice("bits", 2, 4, 8)
        layout = settings.choice(
            "checkpoint_format" if "checkpoint_format" in settings.values else "format",
            "gptq",
            "gptq_v2",
            default="gptq",
        )
        settings.choice("pack_dtype", "int32", default="int32")
        reordered = settings.choice("desc_act", True, False, default=False)
        for field in ("dynamic", "is_marlin_format"):
            settings.empty(field)
        return cls(bits, settings.group_size(default=128), int(layout == "gptq"), reordered)

    @property
    def summary(self) -> str:
        return f"gptq, {self.bits} bits, groups of {self.group_size}"

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
        packed = matrix(f"{module}.qweight", checkpoint)
        return packed and (packed[1], packed[0] * (32 // self.bits))

    def weight(self, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
        outputs, inputs = shape
        fields = 32 // self.bits
        for size, what in ((outputs, "outputs"), (inputs, "inputs")):
            if size % fields:
                raise StartupError(f"{checkpoint.directory}: {module} has {size} {what}, no multiple of {fields}")
        groups = num_groups(module, checkpoint, inputs, self.group_size)
        values = checkpoint.take(f"{module}.qweight", (inputs // fields, outputs), INT32)
        zeros = checkpoint.take(f"{module}.qzeros", (groups, outputs // fields), INT32)
        scales = checkpoint.take(f"{module}.scales", (groups, outputs))
        zeros = (unpack(zeros, self.bits) + self.zero_offset) & (2**self.bits - 1)
        order = group_order(f"{module}.g_idx", checkpoint, inputs, groups, required=self.reordered)
        return dequantise(unpack_columns(values, self.bits), scales.t(), zeros.t(), order)


def group_order(
    name: str, checkpoint: Checkpoint, inputs: int, groups: int, *, required: bool = False
) -> torch.Tensor | None:
    """int64 [I]: the group of each input; None where groups are consecutive or there is no such tensor."""
    if name not in checkpoint and not required:
        return None
    order = checkpoint.take(name, (inputs,), INT32).long()
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise StartupError(
            f"{checkpoint.directory}: {name} holds {int(order.min())}..{int(order.max())}; there are {groups} groups"
        )
    consecutive = torch.arange(inputs) // (inputs // groups)
    return None if torch.equal(order, consecutive) else order

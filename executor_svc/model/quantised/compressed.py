"""compressed-tensors: several ways of storing weights, chosen per group of layers (llm-compressor, vLLM).

    pack-quantized    weight_packed int32 [O, I * bits / 32], weight_scale [O, G], weight_zero_point int32
                      [O * bits / 32, G] (packed along the outputs), weight_g_idx [I], weight_shape [2]
    int-quantized     weight int8 [O, I], weight_scale and weight_zero_point one, [O, 1] or [O, G]
    float-quantized   weight float8_e4m3 [O, I], weight_scale one, [O, 1], [O, G] or of blocks
    nvfp4             weight_packed uint8 [O, I / 2], weight_scale float8_e4m3 [O, I / 16], weight_global_scale [1]

weight = (q - zero) * scale. Packed integers, zero points too, are stored with 2^(bits - 1) added.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import FLOAT8, INT32, Checkpoint
from executor_svc.model.quantised.fp8 import read_block, spread, take_scales
from executor_svc.model.quantised.gptq import group_order
from executor_svc.model.quantised.method import Settings, matrix, num_groups
from executor_svc.model.quantised.nvfp4 import GROUP, take_nvfp4
from executor_svc.model.quantised.packing import dequantise, unpack, unpack_columns

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
INT8 = frozenset({"I8"})
MAX_TARGETS, MAX_PATTERN, MAX_REPETITIONS, MAX_NAME = 4096, 1024, 4, 256


@dataclass(frozen=True)
class Scheme:
    """How the layers that `targets` name are stored."""

    targets: tuple[str, ...]
    is_float: bool
    bits: int
    group_size: int  # -1: no groups of inputs
    block: tuple[int, int] | None
    symmetric: bool

    def names(self, module: str) -> bool:
        """Is this layer named, or matched by a pattern?"""
        return any(
            re.match(target[3:], module[:MAX_NAME]) is not None if target.startswith("re:") else target == module
            for target in self.targets
        )

    def __str__(self) -> str:
        shared = f"groups of {self.group_size}" if self.group_size != -1 else "one scale a weight or an output"
        shared = f"blocks of {self.block[0]}x{self.block[1]}" if self.block else shared
        return f"{'float' if self.is_float else 'int'}{self.bits}, {shared}"


@dataclass(frozen=True)
class CompressedTensors:
    schemes: tuple[Scheme, ...]
    unused: tuple[str, ...] = (
        *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point"),
        *(".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point"),
    )

    @classmethod
    def read(cls, settings: Settings) -> "CompressedTensors":
        settings.choice("format", *FORMATS, "mixed-precision", "dense")
        settings.choice("quantization_status", "compressed", "frozen", default="compressed")
        if settings.part("sparsity_config").values.get("format", "dense") != "dense":
            raise settings.refuse("sparsity_config", settings.part("sparsity_config").values.get("format"), "dense")
        if settings.part("transform_config").values.get("config_groups"):
            raise settings.refuse("transform_config", "config_groups", "none")
        groups = settings.part("config_groups").values
        if not groups:
            raise settings.refuse("config_groups", groups, "one group or more")
        schemes = [_scheme(settings.part("config_groups").part(name)) for name in groups]
        return cls(tuple(scheme for scheme in schemes if scheme is not None))

    @property
    def summary(self) -> str:
        return "compressed-tensors, " + "; ".join(sorted({str(scheme) for scheme in self.schemes}))

    def shape(self, module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
        packed = matrix(f"{module}.weight_packed", checkpoint)
        if packed is None:
            name = f"{module}.weight"
            return matrix(name, checkpoint) if checkpoint.kind(name) in INT8 | FLOAT8 else None
        scheme = self._scheme_of(module, checkpoint)
        if scheme.is_float:
            return packed[0], packed[1] * 2
        told = _told_shape(module, checkpoint)
        return told if told is not None else (packed[0], packed[1] * 32 // scheme.bits)

    def weight(self, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
        scheme = self._scheme_of(module, checkpoint)
        if f"{module}.weight_packed" not in checkpoint:
            return _plain(scheme, module, checkpoint, shape)
        if scheme.is_float:
            return take_nvfp4(module, checkpoint, shape)
        return _packed(scheme, module, checkpoint, shape)

    def _scheme_of(self, module: str, checkpoint: Checkpoint) -> Scheme:
        found = [scheme for scheme in self.schemes if scheme.names(module)]
        found += [scheme for scheme in self.schemes if "Linear" in scheme.targets]
        if not found:
            raise StartupError(
                f"{checkpoint.directory}: no config_groups of config.json name {module}, yet it is quantised"
            )
        return found[0]


def _scheme(settings: Settings) -> Scheme | None:
    """One of `config_groups`; None for one that stores weights as they are."""
    if settings.values.get("weights") is None:
        return None
    settings.choice("format", *FORMATS, default=FORMATS[0])
    weights = settings.part("weights")
    is_float = weights.choice("type", "int", "float", default="int") == "float"
    bits = weights.choice("num_bits", 4, 8)
    strategies = ("tensor_group",) if is_float and bits == 4 else ("tensor", "channel", "group", "block")
    strategy = weights.choice(
        "strategy", *strategies, default="group" if weights.values.get("group_size") else "tensor"
    )
    weights.choice("dynamic", False, default=False)
    weights.choice("actorder", "group", "weight", "static", "dynamic", True, False, default=False)
    if is_float and bits == 4:
        weights.choice("group_size", GROUP, default=GROUP)
    return Scheme(
        _targets(settings),
        is_float,
        bits,
        weights.group_size() if strategy == "group" else GROUP if strategy == "tensor_group" else -1,
        _block(weights) if strategy == "block" else None,
        weights.choice("symmetric", True, False, default=True),
    )


def _block(weights: Settings) -> tuple[int, int]:
    block = read_block(weights, "block_structure")
    if block is None:
        raise weights.refuse("block_structure", None, "two integers")
    return block


def _targets(settings: Settings) -> tuple[str, ...]:
    targets: Any = settings.values.get("targets")
    if not isinstance(targets, list) or len(targets) > MAX_TARGETS:
        raise settings.refuse("targets", targets, f"a list of at most {MAX_TARGETS}")
    for target in targets:
        if not isinstance(target, str) or len(target) > MAX_PATTERN:
            raise settings.refuse("targets", target, f"texts of at most {MAX_PATTERN} characters")
        if target.startswith("re:"):
            _check_pattern(settings, target)
    return tuple(targets)


def _check_pattern(settings: Settings, target: str) -> None:
    """A pattern must be one that cannot keep us busy: few repetitions, none of a group."""
    pattern = target.removeprefix("re:")
    if len(re.findall(r"(?<!\\)[*+{]", pattern)) > MAX_REPETITIONS or re.search(r"(?<!\\)\)[*+{]", pattern):
        raise settings.refuse("targets", target, f"patterns of at most {MAX_REPETITIONS} repetitions, none of a group")
    try:
        re.compile(pattern)
    except re.error:
        raise settings.refuse("targets", target, "regular expressions") from None


def _packed(scheme: Scheme, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
    outputs, inputs = shape
    bits, middle = scheme.bits, 1 << (scheme.bits - 1)
    groups = num_groups(module, checkpoint, inputs, scheme.group_size)
    packed = checkpoint.take(f"{module}.weight_packed", (outputs, -(-inputs * bits // 32)), INT32)
    if _told_shape(module, checkpoint) not in (None, shape):
        told = list(_told_shape(module, checkpoint) or ())
        raise StartupError(
            f"{checkpoint.directory}: {module}.weight_shape is {told}; config.json implies {list(shape)}"
        )
    scales = _wide(f"{module}.weight_scale", checkpoint, outputs, groups)
    zeros: torch.Tensor | None = None
    name = f"{module}.weight_zero_point"
    if name in checkpoint or not scheme.symmetric:
        stored = checkpoint.take(name, (-(-outputs * bits // 32), groups), INT32)
        zeros = unpack_columns(stored, bits).t()[:outputs]
    else:
        zeros = torch.full((outputs, groups), middle, dtype=torch.uint8)
    order = group_order(f"{module}.weight_g_idx", checkpoint, inputs, groups)
    return dequantise(unpack(packed, bits)[:, :inputs], scales, zeros, order)


def _told_shape(module: str, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """`weight_shape`, which tells how much of the last packed integer counts."""
    name = f"{module}.weight_shape"
    if name not in checkpoint:
        return None
    outputs, inputs = checkpoint.take(name, (2,), frozenset({"I64", "I32"})).tolist()
    return outputs, inputs


def _wide(
    name: str, checkpoint: Checkpoint, outputs: int, groups: int, kinds: frozenset[str] | None = None
) -> torch.Tensor:
    """[O, G], from that or, where there is one group, from one number or one of each output."""
    found = checkpoint.shape(name)
    if groups == 1 and found in {(), (1,), (1, 1)}:
        shape: tuple[int, ...] = found
    elif groups == 1 and len(found) == 1:
        shape = (outputs,)
    else:
        shape = (outputs, groups)
    taken = checkpoint.take(name, shape) if kinds is None else checkpoint.take(name, shape, kinds)
    return taken.reshape(-1, groups).expand(outputs, groups)


def _plain(scheme: Scheme, module: str, checkpoint: Checkpoint, shape: tuple[int, int]) -> torch.Tensor:
    """Weights of one byte each."""
    outputs, inputs = shape
    stored = checkpoint.take(f"{module}.weight", shape, FLOAT8 if scheme.is_float else INT8)
    scale, zero = f"{module}.weight_scale", f"{module}.weight_zero_point"
    if scheme.block is not None:
        return spread(stored.float(), take_scales(scale, checkpoint, shape, scheme.block), scheme.block)
    groups = num_groups(module, checkpoint, inputs, scheme.group_size)
    has_zeros = not scheme.is_float and (zero in checkpoint or not scheme.symmetric)
    zeros = _wide(zero, checkpoint, outputs, groups, INT8) if has_zeros else None
    return dequantise(stored, _wide(scale, checkpoint, outputs, groups), zeros)

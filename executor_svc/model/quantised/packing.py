"""The arithmetic that methods share: small integers out of wide ones, then values, zero points and scales together.

Shapes: O outputs, I inputs, G groups of inputs that share a scale.
"""

import torch


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n * item bits / bits]: fields of the last axis' integers, lowest first; `bits` is 2, 4 or 8."""
    octets = packed.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def unpack_columns(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The same over the first axis of a matrix: [n, m] -> [m, n * item bits / `bits`], transposed."""
    return unpack(packed.t(), bits)


def dequantise(
    values_OI: torch.Tensor,
    scales_OG: torch.Tensor,
    zeros_OG: torch.Tensor | None = None,
    group_of_input: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [O, I]: (value - zero) * scale.

    Groups are consecutive and of equal size, or `group_of_input` [I] says which each input belongs to; it was checked
    to be within 0..G - 1.
    """
    scales, zeros = scales_OG.float(), None if zeros_OG is None else zeros_OG.float()
    weight = torch.empty(values_OI.shape).copy_(values_OI)
    if group_of_input is not None:
        if zeros is not None:
            weight -= zeros[:, group_of_input]
        return weight.mul_(scales[:, group_of_input])
    grouped = weight.view(weight.shape[0], scales.shape[1], -1)
    if zeros is not None:
        grouped -= zeros[..., None]
    grouped *= scales[..., None]
    return weight

"""A checkpoint's parameters as torch tensors, for the decoders that compute in torch."""

import warnings
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from executor_svc.model.elements import BITS_OF_BFLOAT16


def tensors(value: Any) -> Any:
    """`value`, an array or weights that consist of arrays, with tensors over the same memory in their place.

    What is a tensor already, or None, stays what it is. Nobody may write to them: they may be a file's mapping.
    """
    if isinstance(value, np.ndarray):
        return _tensor(value)
    if isinstance(value, list):
        return [tensors(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: tensors(getattr(value, field.name)) for field in fields(value)})
    return value


def _tensor(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        found = torch.from_numpy(array)
    return found.view(torch.bfloat16) if array.dtype == BITS_OF_BFLOAT16 else found

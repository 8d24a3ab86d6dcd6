"""What a decoder is: token ids and block tables in, logits out. Imports nothing that computes."""

from typing import TYPE_CHECKING, Protocol

from executor_svc.kv_cache import KVShape

if TYPE_CHECKING:
    import numpy as np
    import torch


class Served(KVShape, Protocol):
    """What a backend needs to know of a model: the sizes of its cache, and its limits."""

    @property
    def architecture(self) -> str: ...

    @property
    def max_position(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class Decoder(Protocol):
    """What a backend runs."""

    @property
    def config(self) -> Served: ...

    @property
    def kv_dtype(self) -> "str | torch.dtype":
        """Of the pages it reads and writes."""
        ...

    description: str  # how it computes, for the log

    def forward(self, batch, kv) -> "np.ndarray | torch.Tensor":
        """Compute the step's tokens, store their keys and values; float32 logits of `batch.logits_index`."""
        ...

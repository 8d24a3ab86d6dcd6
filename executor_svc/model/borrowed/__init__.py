"""Architectures outside our table: transformers' own modules compute them, with our paged attention plugged in.

No code of a model's folder ever runs: config.json is read by us, tensors come through our checked safetensors reader,
and only classes of the installed transformers are built. transformers is imported by this package alone, when it is
needed; `load` imports torch.
"""

from executor_svc.model.borrowed.description import Description, describe

__all__ = ["Description", "describe"]

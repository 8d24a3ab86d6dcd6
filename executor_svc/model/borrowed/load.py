"""From a description to a decoder: build transformers' model, fill it with our checkpoint's tensors, check it."""

import math
from pathlib import Path

import torch

from executor_svc.errors import StartupError
from executor_svc.model.borrowed.decoder import BorrowedDecoder
from executor_svc.model.borrowed.description import Description, first_line
from executor_svc.model.borrowed.interface import NAME, CannotBorrow, register
from executor_svc.model.borrowed.self_check import check_itself
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.quantised import Method, quantised_modules

INTEGERS = {"BOOL", "U8", "I16", "I32", "I64"}


def load_borrowed(path: str | Path, described: Description, dtype: torch.dtype) -> BorrowedDecoder:
    """The decoder; StartupError names what is missing or why the model cannot be computed in our way."""
    from transformers.utils import logging

    register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    checkpoint = Checkpoint(path)
    try:
        _check_size(checkpoint, described)
        model = _fill(checkpoint, described, dtype)
        decoder = BorrowedDecoder(
            model,
            architecture=described.architecture,
            vocab_size=described.vocab_size,
            max_position=described.max_position,
        )
        check_itself(decoder)
    except CannotBorrow as reason:
        raise StartupError(f"{path}: architecture {described.architecture!r} is not supported: {reason}") from None
    except StartupError:
        raise
    except Exception as error:  # of a class that nobody here has read
        raise StartupError(f"{path}: transformers cannot compute it: {first_line(error)}") from None
    return decoder


def _check_size(checkpoint: Checkpoint, described: Description) -> None:
    """The config's model must not be larger than the checkpoint; nothing of it is allocated here."""
    try:
        with torch.device("meta"):
            model = described.model_class(described.config)
    except Exception as error:
        raise StartupError(f"{checkpoint.directory}: transformers cannot build it: {first_line(error)}") from None
    implied = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() for buffer in model.buffers())
    tied = model.get_input_embeddings().weight.numel()
    stored = num_stored(checkpoint, described.quantised)
    if implied > stored + tied or buffers > max(stored, 1 << 24):
        raise StartupError(
            f"{checkpoint.directory}: config.json implies {implied:,} parameters, the checkpoint holds {stored:,}"
        )


def num_stored(checkpoint: Checkpoint, method: Method | None) -> int:
    """Parameters that the checkpoint holds, those of quantised layers counted as what they become."""
    layers = {} if method is None else quantised_modules(method, checkpoint)
    plain = (
        math.prod(entry.shape)
        for name, entry in checkpoint.entries.items()
        if entry.dtype not in INTEGERS and (name.endswith(".bias") or name.rpartition(".")[0] not in layers)
    )
    return sum(plain) + sum(math.prod(shape) for shape in layers.values())


def _tensors(checkpoint: Checkpoint, method: Method | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Everything that can be a parameter; quantised layers as weights in `dtype`."""
    unused: tuple[str, ...] = ()
    tensors = {}
    if method is not None:
        unused = method.unused
        for module, shape in quantised_modules(method, checkpoint).items():
            tensors[f"{module}.weight"] = method.weight(module, checkpoint, shape).to(dtype)
    for name, entry in checkpoint.entries.items():
        # No parameter is an integer: old checkpoints keep masks and tables.
        if entry.dtype not in INTEGERS and not checkpoint.was_taken(name) and not name.endswith(unused):
            tensors[name] = checkpoint.take(name, entry.shape)
    return tensors


def _fill(checkpoint: Checkpoint, described: Description, dtype: torch.dtype) -> torch.nn.Module:
    tensors = _tensors(checkpoint, described.quantised, dtype)
    try:
        model, found = described.model_class.from_pretrained(
            None,
            config=described.config,
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told apart below
        )
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(f"{checkpoint.directory}: transformers cannot load it: {first_line(error)}") from None
    for kind, what in (
        ("mismatched_keys", "another shape than config.json implies has tensor"),
        ("missing_keys", "the checkpoint lacks tensor"),
        ("unexpected_keys", "this tensor does not belong to the architecture of config.json:"),
    ):
        keys = [key if isinstance(key, str) else str(key[0]) for key in found.get(kind) or ()]
        names = sorted(name for name in keys if not _is_table(name, checkpoint))
        if names:
            raise StartupError(f"{checkpoint.directory}: {what} {names[0]!r}")
    checkpoint.close()
    return model.eval()


def _is_table(name: str, checkpoint: Checkpoint) -> bool:
    """Is this something that a model computes anew: frequencies, or a causal mask?"""
    if name not in checkpoint:
        return False
    is_mask = name.endswith(("attn.bias", "attention.bias")) and len(checkpoint.shape(name)) == 4
    return is_mask or name.endswith((".inv_freq", ".masked_bias"))

"""What is about to be loaded, in one line before it is: what lies on disk, what becomes of it, what memory there is."""

from pathlib import Path

from executor_svc.geometry import show_bytes
from executor_svc.model.borrowed import Description
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import ITEM_BYTES

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def report(path: Path, config: ModelConfig | Description, dtype: str, free: int, where: str) -> str:
    """One line; reads headers alone. `dtype` is the name of a type; `free` bytes of `where` are there for weights and
    KV cache together."""
    checkpoint = Checkpoint(path)
    stored = _main_type(checkpoint) if config.quantised is None else config.quantised.summary
    if isinstance(config, Description):  # its parameters are those of the checkpoint
        from executor_svc.model.borrowed.load import num_stored

        parameters = num_stored(checkpoint, config.quantised)
        size = parameters * ITEM_BYTES[dtype]
    else:
        parameters = num_parameters(config)
        size = weight_bytes(config, ITEM_BYTES[dtype])
    return (
        f"{parameters / 1e6:,.0f} M parameters: {show_bytes(checkpoint.num_bytes)} on disk"
        f" ({stored}), {show_bytes(size)} as {dtype}; {show_bytes(free)} of {where} are free"
    )


def num_parameters(config: ModelConfig) -> int:
    """Of all linear layers and the embedding, tied ones once; norms and biases are too few to count."""
    tied = config.tie_embeddings is True
    return _in_layers(config) + config.vocab_size * config.hidden_size * (1 if tied else 2)


def weight_bytes(config: ModelConfig, item_bytes: int) -> int:
    """As they lie in memory: dequantised, the head apart from the embedding, which never takes less than two bytes."""
    embedding = config.vocab_size * config.hidden_size
    return (_in_layers(config) + embedding) * item_bytes + embedding * max(2, item_bytes)


def _in_layers(config: ModelConfig) -> int:
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    dense = 3 * config.hidden_size * config.intermediate_size
    experts = config.num_experts * (3 * config.hidden_size * config.expert_size + config.hidden_size)
    return sum(attention + (experts if layer.is_sparse else dense) for layer in config.layers)


def _main_type(checkpoint: Checkpoint) -> str:
    """The type that most bytes have."""
    sizes: dict[str, int] = {}
    for entry in checkpoint.entries.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    largest = max(sizes, key=lambda kind: sizes[kind], default="F32")
    return _NAMES.get(largest, largest)

"""A random Llama small enough for processes that are killed all day, with a tokenizer that fits it."""

from pathlib import Path

from tests.unit.frontend.tiny_models import byte_level

VOCAB_SIZE = 512


def make_tiny_model(folder: Path) -> Path:
    """A model directory as transformers writes it: float32, two layers, the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    directory = folder / "tiny"
    LlamaForCausalLM(config).eval().save_pretrained(directory)
    (directory / "tokenizer.json").write_text(byte_level())
    return directory

"""Tiny random models made by transformers, and a scheduler stand-in that drives a decoder step by step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import name_of
from executor_svc.model.load import load_model
from executor_svc.model.native_decoder import NativeDecoder

torch.set_num_threads(1)

SEED = 20261129
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def make_model(directory: Path, model_type: str, **overrides: Any):
    """Save a random model of `model_type` into `directory`; returns transformers' own float32 instance."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**TINY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **overrides}
    config = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if v is not None})
    config._attn_implementation = "eager"
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(
                    torch.randn_like(parameter) * (1.5 if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5)
                )
    model.save_pretrained(directory)
    return model


def load_decoders(directory: Path, config: ModelConfig) -> dict:
    """The float32 decoders of a model: torch's, and the native one where it can run."""
    decoders = {"torch": load_model(directory, config, dtype="float32", use_native=False)}
    native = load_model(directory, config, dtype="float32", num_threads=2)
    if isinstance(native, NativeDecoder):
        decoders["native"] = native
    return decoders


@dataclass
class Batch:
    """The fields of ForwardBatch that a decoder reads."""

    rows: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    block_tables: np.ndarray
    sampled: np.ndarray
    logits_index: np.ndarray
    num_tokens: int


class Pool:
    """KV pages; poisoned, so that reading what nobody wrote shows."""

    def __init__(self, config, block_size: int, num_blocks: int, dtype="float32", poison: float = float("nan")):
        dtype = getattr(torch, name_of(dtype))
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        self.layers = [
            (torch.full(shape, poison, dtype=dtype), torch.full(shape, poison, dtype=dtype))
            for _ in range(config.num_layers)
        ]
        kind = torch.uint16 if dtype == torch.bfloat16 else dtype
        self.pages = [(k.view(kind).numpy(), v.view(kind).numpy()) for k, v in self.layers]
        self.block_size, self.num_blocks = block_size, num_blocks


@dataclass
class Row:
    """One sequence: its known tokens, how many are computed, its blocks."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # by position


class Driver:
    """Runs rows through a decoder: any number of rows and tokens per step, pages handed out in random order."""

    def __init__(self, decoder, config, *, block_size: int = 16, num_blocks: int = 256, pool: Pool | None = None):
        self.decoder, self.config = decoder, config
        self.kv = pool or Pool(config, block_size, num_blocks, decoder.kv_dtype)
        self.free = np.random.default_rng(SEED).permutation(self.kv.num_blocks).tolist()

    def step(self, work: list[tuple[Row, int]]) -> None:
        """Compute the next `count` tokens of each row; rows that catch up sample greedily."""
        for row, count in work:
            while len(row.blocks) * self.kv.block_size < row.computed + count:
                row.blocks.append(self.free.pop())
        batch = self.batch(work)
        logits = torch.as_tensor(self.decoder.forward(batch, self.kv))
        assert logits.dtype == torch.float32
        assert logits.shape == (int(batch.sampled.sum()), self.config.vocab_size)
        results = iter(logits)
        for row, count in work:
            row.computed += count
            if row.computed == len(row.tokens):
                row.logits[row.computed - 1] = next(results).clone()
                row.tokens.append(int(row.logits[row.computed - 1].argmax()))

    def batch(self, work: list[tuple[Row, int]]) -> Batch:
        size = self.kv.block_size
        positions = [np.arange(row.computed, row.computed + n) for row, n in work]
        tables = np.full((len(work), max(len(row.blocks) for row, _ in work)), -1, np.int32)
        for i, (row, _) in enumerate(work):
            tables[i, : len(row.blocks)] = row.blocks
        slots = [np.array(row.blocks)[p // size] * size + p % size for (row, _), p in zip(work, positions, strict=True)]
        starts = np.cumsum([0] + [n for _, n in work])
        sampled = np.array([row.computed + n == len(row.tokens) for row, n in work])
        i32 = np.int32
        return Batch(
            rows=np.arange(len(work), dtype=i32),
            token_ids=np.concatenate([row.tokens[row.computed : row.computed + n] for row, n in work]).astype(i32),
            positions=np.concatenate(positions).astype(i32),
            slot_mapping=np.concatenate(slots).astype(np.int64),
            cu_seqlens=starts.astype(i32),
            seq_lens=np.array([row.computed + n for row, n in work], i32),
            block_tables=tables,
            sampled=sampled,
            logits_index=(starts[1:][sampled] - 1).astype(i32),
            num_tokens=int(starts[-1]),
        )

    def run(self, row: Row, *, chunk: int, num_outputs: int) -> Row:
        """The row alone: its prompt in chunks, then one token a step."""
        target = len(row.tokens) + num_outputs
        while len(row.tokens) < target:
            self.step([(row, min(chunk, len(row.tokens) - row.computed))])
        return row


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return np.random.default_rng([SEED, seed]).integers(3, TINY["vocab_size"], length).tolist()


def check_against(model, row: Row, *, tolerance: float = 1e-4) -> None:
    """Every sampled position of `row`: logits near transformers' on the same tokens, and the same greedy choice."""
    with torch.inference_mode():
        reference = model(torch.tensor([row.tokens])).logits[0].float()
    for position, logits in row.logits.items():
        expected = reference[position]
        error = (logits - expected).norm() / expected.norm()
        assert error < tolerance, f"position {position}: relative error {error:.2e}"
        assert int(expected.argmax()) == row.tokens[position + 1], f"position {position}: another greedy choice"

"""A whole decode step of an 8B-shaped model with random weights: eager, recorded, and against its memory roofline."""

from functools import partial

import torch

from benchmarks.gpu_bench import Bench
from executor_svc.backends.cuda import CudaBackend, decode_layout
from executor_svc.backends.cuda_decoder import TritonDecoder
from executor_svc.backends.cuda_memory import kv_block_bytes, make_kv
from executor_svc.backends.cuda_step import StepTensors
from executor_svc.graphs import GraphKey
from executor_svc.model.config import ModelConfig
from executor_svc.model.weights import LayerWeights, LinearWeights, WeightSource
from kernels.attention_decode import num_splits
from protos.stepwire.wire.v1 import step_pb2

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


class RandomWeights(WeightSource):
    """A checkpoint of noise, made where it is used."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
        self.config, self._device, self._dtype = config, device, dtype

    def _random(self, outputs: int, inputs: int) -> LinearWeights:
        weight = torch.randn((outputs, inputs), dtype=self._dtype, device=self._device)
        return LinearWeights(weight.mul_(inputs**-0.5))

    def _ones(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size, device=self._device)

    def embedding(self) -> torch.Tensor:
        return self._random(self.config.vocab_size, self.config.hidden_size).weight

    def head(self) -> LinearWeights:
        return self._random(self.config.vocab_size, self.config.hidden_size)

    def final_norm(self) -> torch.Tensor:
        return self._ones()

    def layer(self, index: int) -> LayerWeights:
        c = self.config
        return LayerWeights(
            attention_in=self._ones(),
            attention_out=None,
            mlp_in=self._ones(),
            mlp_out=None,
            q_norm=None,
            k_norm=None,
            qkv=self._random(c.q_size + 2 * c.kv_size, c.hidden_size),
            output=self._random(c.hidden_size, c.q_size),
            gate_up=self._random(2 * c.intermediate_size, c.hidden_size),
            down=self._random(c.hidden_size, c.intermediate_size),
            experts=None,
        )

    def finish(self) -> None:
        """Nothing was opened."""


def make_backend(bench: Bench, rows: int, length: int, *, batched_tokens: int | None = None) -> CudaBackend:
    config = ModelConfig.from_dict(TINY if bench.dry else LLAMA_8B)
    device = torch.device(bench.device)
    decoder = TritonDecoder(RandomWeights(config, bench.device, bench.dtype), dtype=bench.dtype, device=device)
    geometry = step_pb2.Geometry(
        num_blocks=rows * -(-length // 16),
        block_size=16,
        max_num_seqs=rows,
        max_model_len=length,
        max_num_batched_tokens=batched_tokens or rows,
        vocab_size=config.vocab_size,
    )
    kv = make_kv(config, geometry, bench.dtype, device)
    return CudaBackend(decoder, kv, geometry, step_pb2.ModelIdentity(), bench.device)


def decode_step(bench: Bench) -> None:
    length = 32 if bench.dry else 2048
    most = 2 if bench.dry else 128
    backend = make_backend(bench, most, length)
    config = backend._decoder.config
    blocks = torch.randperm(backend.geometry.num_blocks, dtype=torch.int32, device=bench.device)
    backend._tables.copy_(blocks.view(most, -1))
    weights = (
        sum(p.numel() * 2 for layer in backend._decoder.layers for p in _weights(layer))
        + 2 * config.vocab_size * config.hidden_size
    )
    for rows in bench.within(bench.pick([1, 8, 32, 64, 128], [2])):
        layout = decode_layout(rows)
        flat = torch.zeros(sum(-(-n // 4) * 4 for n in layout), dtype=torch.int32, device=bench.device)
        step = StepTensors.of(flat, layout, all_logits=True, max_splits=num_splits(length))
        _fill(step, length)
        eager = bench.seconds(partial(backend._compute, step))
        read = weights + rows * kv_block_bytes(config, length, torch.bfloat16)
        figures: dict[str, object] = {"eager_ms": round(eager * 1e3, 3)}
        if not bench.dry:
            expected = backend._compute(step)
            recording = backend._record(GraphKey(rows, num_splits(length)))
            recording.flat.copy_(flat)
            recording.replay()
            replayed = bench.seconds(recording.replay)
            figures |= {
                "graph_ms": round(replayed * 1e3, 3),
                "roofline_ms": round(read / bench.copy_rate * 1e3, 3),
                "of_roofline": f"{read / bench.copy_rate / replayed:.0%}",
                "ok": torch.equal(recording.logits, expected),
            }
        bench.add("step", f"decode, B={rows} L={length}", **figures)


def _fill(step: StepTensors, length: int) -> None:
    """Every row decodes its last position; nothing is stored, so that each replay is the same."""
    step.slots.fill_(-1)
    step.rows.copy_(torch.arange(len(step.rows)))
    step.token_rows.copy_(step.rows)
    step.positions.fill_(length - 1)
    step.seq_lens.fill_(length)


def _weights(layer: object) -> list[torch.Tensor]:
    return [getattr(layer, name).weight for name in ("qkv", "output", "gate_up", "down")]

"""What others reach on this GPU, in the same run: torch's attention on dense and on paged keys, transformers' batching.

A peer that this machine's versions lack, or that refuses the shape, is a row that says so.
"""

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_step import LLAMA_8B as MODEL

HEADS = (32, 8, 128)  # Hq, Hkv, D
PAGE = 256  # the smallest that torch's paged attention takes everywhere
PREFILLS = [512, 1024, 2048, 4096, 8192, 16384]
DECODES = [(8, 4096), (32, 4096), (64, 4096), (128, 4096)]
STREAMS = (32, 512, 256)  # as one of `gpu_serving`


def attention(bench: Bench) -> None:
    heads = bench.pick([HEADS], [(2, 1, 16)])[0]
    tokens = bench.pick([16384], [32])[0]
    for length in bench.within(bench.pick(PREFILLS, [32])):
        for name, call in prefills(bench, heads, tokens // length, length).items():
            flop = 2 * heads[0] * heads[2] * tokens * length
            _row(bench, f"{name} prefill S={length}", call, "TFLOP_s", flop / 1e12)
    for rows, length in bench.within(bench.pick(DECODES, [(2, 32)])):
        for name, call in decodes(bench, heads, rows, length).items():
            size = 2 * rows * length * heads[1] * heads[2] * 2
            _row(bench, f"{name} decode B={rows} L={length}", call, "GB_s", size / 1e9)


def _row(bench: Bench, what: str, call: Callable[[], object], unit: str, amount: float) -> None:
    try:
        bench.add("attention", what, **{unit: bench.figure(amount / bench.seconds(call))})
    except (RuntimeError, ValueError, TypeError) as error:
        bench.add("attention", what, not_here=str(error).strip().splitlines()[0][:80])


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, name: str, causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _kernels(bench: Bench) -> list[str]:
    return bench.pick(["FLASH_ATTENTION", "CUDNN_ATTENTION"], ["MATH"])


def prefills(bench: Bench, heads: tuple[int, int, int], rows: int, length: int) -> dict[str, Callable[[], object]]:
    q_heads, kv_heads, head_size = heads
    q, k, v = (bench.random(rows, count, length, head_size) for count in (q_heads, kv_heads, kv_heads))
    return {f"torch {name.lower()}": partial(_dense, q, k, v, name=name, causal=True) for name in _kernels(bench)}


def decodes(bench: Bench, heads: tuple[int, int, int], rows: int, length: int) -> dict[str, Callable[[], object]]:
    """One query a row over dense keys, and over pages where torch can."""
    q_heads, kv_heads, head_size = heads
    k, v = (bench.random(rows, kv_heads, length, head_size) for _ in range(2))
    q = bench.random(rows, q_heads, 1, head_size)
    calls: dict[str, Callable[[], object]] = {
        f"torch {name.lower()} dense": partial(_dense, q, k, v, name=name, causal=False) for name in _kernels(bench)
    }
    if not bench.dry:
        calls["torch varlen paged"] = partial(_paged, bench, q[:, :, 0].contiguous(), rows, length, heads[1:])
    return calls


def _paged(bench: Bench, q: torch.Tensor, rows: int, length: int, kv_shape: tuple[int, int]) -> object:
    """Made anew by each call but for what is kept on it: pages are large."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise RuntimeError("this torch has no varlen_attn") from None
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise RuntimeError("this torch's varlen_attn knows no pages")
    if _PAGES.get("shape") != (rows, length):
        pages = rows * length // PAGE
        _PAGES.clear()
        _PAGES["shape"] = (rows, length)
        _PAGES["k"], _PAGES["v"] = (bench.random(pages, PAGE, *kv_shape) for _ in range(2))
        order = torch.randperm(pages, device=bench.device, dtype=torch.int32)
        _PAGES["table"] = order.view(rows, -1).contiguous()
        _PAGES["starts"] = torch.arange(rows + 1, device=bench.device, dtype=torch.int32)
        _PAGES["used"] = torch.full((rows,), length, device=bench.device, dtype=torch.int32)
    keys, values, table, starts, used = (_PAGES[name] for name in ("k", "v", "table", "starts", "used"))
    options = {"enable_gqa": True, "seqused_k": used, "block_table": table}
    return varlen_attn(q, keys, values, starts, None, 1, length, **options)


_PAGES: dict = {}


def transformers_batching(bench: Bench) -> None:
    """The same model and load through transformers' continuous batching, in process: no server, no wire."""
    what = "transformers continuous batching"
    if bench.dry:
        bench.add("peers", what, not_here="a dry run takes no time for it")
        return
    try:
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError:
        bench.add("peers", what, not_here="not installed")
        return
    streams, prompt, output = STREAMS
    shape: dict[str, Any] = {key: value for key, value in MODEL.items() if key != "architectures"}
    with torch.device(bench.device):
        torch.set_default_dtype(bench.dtype)
        model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
        torch.set_default_dtype(torch.float32)
    config = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = torch.randint(0, shape["vocab_size"], (streams, prompt)).tolist()
    try:
        for count in (1, streams):  # the first time warms up
            began = time.perf_counter()
            done = model.generate_batch(inputs=prompts[:count], generation_config=config, progress_bar=False)
            seconds = time.perf_counter() - began
        tokens = sum(len(result.generated_tokens) for result in done.values())
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        bench.add("peers", what, not_here=str(error).strip().splitlines()[0][:80])
        return
    bench.add("peers", f"{what}, {streams} x {prompt}/{output}", tokens_s=bench.figure(tokens / seconds))

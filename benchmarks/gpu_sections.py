"""The sections of `benchmarks.gpu`: each measures one kind of kernel and adds rows to the bench."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_peers import attention, transformers_batching
from benchmarks.gpu_serving import serving
from benchmarks.gpu_step import decode_step
from kernels import reference
from kernels.attention_decode import DecodeWorkspace, decode_attention, num_splits
from kernels.attention_prefill import block_q_for, plan_prefill, prefill_attention
from kernels.logits import argmax_lse
from kernels.norm_act import gated_activation, rms_norm
from kernels.paged import QUANT_LIMIT, AttentionSpec, PagedKV
from kernels.rope_cache import rope_and_cache
from kernels.sample import CANDIDATES, sample

LLAMA_8B, SMOLLM = (32, 8, 128), (9, 3, 64)  # Hq, Hkv, D
BLOCK_SIZE = 16
TOLERANCE = 1e-2  # relative, bfloat16 against float64


def ceilings(bench: Bench) -> None:
    size = 1 << (12 if bench.dry else 32)
    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bench.copy_rate = 2 * size / bench.seconds(lambda: target.copy_(source))
    bench.add("ceilings", "copy", GB_s=round(bench.copy_rate / 1e9, 1))
    n = 64 if bench.dry else 8192
    a, b = bench.random(n, n), bench.random(n, n)
    bench.matmul_rate = 2 * n**3 / bench.seconds(lambda: a @ b)
    bench.add("ceilings", f"bfloat16 matrix product {n}", TFLOP_s=round(bench.matmul_rate / 1e12, 1))


def make_kv(bench: Bench, shape: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> PagedKV:
    """Random contents for `tokens` tokens."""
    _, kv_heads, head_size = shape
    kv = PagedKV.empty((-(-tokens // BLOCK_SIZE), BLOCK_SIZE, kv_heads, head_size), dtype, bench.device)
    if kv.scale is not None:
        kv.cache.view(torch.uint8).random_(0, 100)
        kv.scale.fill_(0.01)
    else:
        kv.cache.normal_()
    return kv


def random_tables(kv: PagedKV, rows: int) -> torch.Tensor:
    """Blocks dealt out at random, all of them."""
    order = torch.randperm(kv.cache.shape[0], device=kv.cache.device, dtype=torch.int32)
    return order[: len(order) // rows * rows].view(rows, -1).contiguous()


def decode_case(
    bench: Bench, shape: tuple[int, int, int], rows: int, length: int, dtype: torch.dtype
) -> tuple[Callable[[], torch.Tensor], dict[str, Any]]:
    """A decode step of one layer, and what it was made of."""
    q_heads, _, head_size = shape
    kv = make_kv(bench, shape, rows * -(-length // BLOCK_SIZE) * BLOCK_SIZE, dtype)
    q = bench.random(rows, q_heads, head_size)
    arguments: dict[str, Any] = {
        "block_table": random_tables(kv, rows),
        "seq_lens": torch.full((rows,), length, dtype=torch.int32, device=bench.device),
        "max_splits": num_splits(length),
        "workspace": DecodeWorkspace((rows, q_heads, num_splits(length), head_size), bench.device),
        "out": torch.empty_like(q),
    }
    spec = AttentionSpec(head_size**-0.5)
    return lambda: decode_attention(q, kv, spec, **arguments), {"q": q, "kv": kv, "spec": spec, **arguments}


def correctness(bench: Bench) -> None:
    dtypes = [bench.dtype, torch.int8] + ([torch.float8_e4m3fn] if bench.dry or _has_fp8() else [])
    for dtype in dtypes:
        for shape in (LLAMA_8B, SMOLLM) if not bench.dry else ((3, 1, 64),):
            run, made = decode_case(bench, shape, 3, 17 if bench.dry else 700, dtype)
            got = run().cpu()
            cu_seqlens = torch.arange(4, dtype=torch.int32)
            cpu_kv = PagedKV(made["kv"].cache.cpu(), made["kv"].scale.cpu() if made["kv"].scale is not None else None)
            expected = reference.paged_attention(
                made["q"].cpu(),
                cpu_kv,
                made["spec"],
                block_table=made["block_table"].cpu(),
                cu_seqlens=cu_seqlens,
                seq_lens=made["seq_lens"].cpu(),
            )
            error = float((got.double() - expected).norm() / expected.norm())
            name = str(dtype).removeprefix("torch.")
            bench.add("correctness", f"decode {shape} {name}", error=f"{error:.1e}", ok=error < TOLERANCE)
            alone = decode_attention(
                made["q"][1:2],
                made["kv"],
                made["spec"],
                block_table=made["block_table"][1:2],
                seq_lens=made["seq_lens"][1:2],
                max_splits=made["max_splits"],
                workspace=made["workspace"],
                out=torch.empty_like(made["q"][1:2]),
            )
            bench.add(
                "correctness", f"decode {shape} {name} alone = in a batch", ok=torch.equal(alone.cpu()[0], got[1])
            )


def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def decode(bench: Bench) -> None:
    dtypes = [bench.dtype, torch.int8] + ([torch.float8_e4m3fn] if bench.dry or _has_fp8() else [])
    sizes = [(1, 4096), (1, 65536), (8, 4096), (8, 16384), (32, 4096), (64, 1024), (64, 4096), (128, 4096), (256, 1024)]
    for shape in bench.pick([LLAMA_8B, SMOLLM], [(3, 1, 64)]):
        for dtype in dtypes:
            for rows, length in bench.within(bench.pick(sizes, [(2, 20)])):
                run, made = decode_case(bench, shape, rows, length, dtype)
                bytes_read = 2 * rows * length * shape[1] * (shape[2] * dtype.itemsize + 4 * (dtype in QUANT_LIMIT))
                del made
                rate = bytes_read / bench.seconds(run)
                name = str(dtype).removeprefix("torch.")
                bench.add(
                    "decode",
                    f"{shape} {name} B={rows} L={length}",
                    GB_s=bench.figure(rate / 1e9),
                    of_copy=f"{rate / bench.copy_rate:.0%}" if not bench.dry else "-",
                    plot="decode",
                    label=f"D={shape[2]} {name}",
                    at=rows * length,
                )


def prefill(bench: Bench) -> None:
    for shape in bench.pick([LLAMA_8B, SMOLLM], [(3, 1, 64)]):
        q_heads, _, head_size = shape
        for length in bench.within(bench.pick([512, 1024, 2048, 4096, 8192, 16384], [33])):
            rows = max(1, (16384 if not bench.dry else 33) // length)
            kv = make_kv(bench, shape, rows * -(-length // BLOCK_SIZE) * BLOCK_SIZE, bench.dtype)
            q = bench.random(rows * length, q_heads, head_size)
            cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32)
            seq_lens = torch.full((rows,), length, dtype=torch.int32)
            work = plan_prefill(cu_seqlens.numpy(), seq_lens.numpy(), block_q_for(q_heads, kv))
            arguments: dict[str, Any] = {
                "block_table": random_tables(kv, rows),
                "cu_seqlens": cu_seqlens.to(bench.device),
                "seq_lens": seq_lens.to(bench.device),
                "work": torch.from_numpy(work).to(bench.device),
                "out": torch.empty_like(q),
            }
            spec = AttentionSpec(head_size**-0.5)
            flop = 2 * q_heads * head_size * rows * length**2
            ours = flop / bench.seconds(partial(prefill_attention, q, kv, spec, **arguments))
            figures = {"plot": "prefill", "label": f"D={head_size}", "at": length}
            what = f"{shape} B={rows} S={length} causal"
            bench.add("prefill", what, TFLOP_s=bench.figure(ours / 1e12), **figures)


def elementwise(bench: Bench) -> None:
    tokens, width, inner = (8192, 4096, 14336) if not bench.dry else (2, 64, 96)
    x, stream, weight = bench.random(tokens, width), bench.random(tokens, width), bench.random(width)
    gate_up = bench.random(tokens, 2 * inner)
    q_heads, kv_heads, head_size = LLAMA_8B if not bench.dry else (3, 1, 64)
    qkv = bench.random(tokens, (q_heads + 2 * kv_heads) * head_size)
    kv = make_kv(bench, (q_heads, kv_heads, head_size), tokens + BLOCK_SIZE, bench.dtype)
    index = torch.arange(tokens, dtype=torch.int32, device=bench.device)
    table = torch.randn((tokens, head_size), device=bench.device)
    q = torch.empty((tokens, q_heads, head_size), dtype=bench.dtype, device=bench.device)
    cases = {
        "rms_norm with residual": (lambda: rms_norm(x, weight, 1e-5, residual=stream), 8 * tokens * width),
        "silu and multiply": (lambda: gated_activation(gate_up, "silu"), 6 * tokens * inner),
        "rope and cache write": (
            lambda: rope_and_cache(qkv, kv, cos_sin=table, positions=index, slots=index, q_out=q),
            4 * qkv.numel(),
        ),
    }
    for name, (call, size) in cases.items():
        rate = size / bench.seconds(call)
        of_copy = f"{rate / bench.copy_rate:.0%}" if not bench.dry else "-"
        bench.add("elementwise", f"{name}, {tokens} tokens", GB_s=round(rate / 1e9, 1), of_copy=of_copy)


def softmax_and_sort(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).sort(descending=True).values


def sampling(bench: Bench) -> None:
    for vocab in bench.pick([49152, 128256], [300]):
        for rows in bench.within(bench.pick([1, 16, 64, 256], [2])):
            logits = 4 * torch.randn((rows, vocab), device=bench.device)
            integers = torch.zeros(rows, dtype=torch.int32, device=bench.device)
            scratch = torch.empty((rows, CANDIDATES), device=bench.device)
            bench.add(
                "sampling", f"argmax {rows} x {vocab}", us=round(1e6 * bench.seconds(partial(argmax_lse, logits)), 1)
            )
            for name, (temperature, top_p, min_p, top_k) in {
                "plain": (1.0, 1.0, 0.0, 0),
                "top-k 40, top-p 0.95": (0.8, 0.95, 0.0, 40),
                "top-p 0.9": (1.0, 0.9, 0.0, 0),
            }.items():
                columns = {
                    "params": torch.tensor([[temperature, top_p, min_p]], device=bench.device).repeat(rows, 1),
                    "top_k": torch.full_like(integers, top_k),
                    "seeds": integers.long(),
                    "choices": integers,
                    "positions": integers,
                    "scratch": scratch,
                }
                seconds = bench.seconds(partial(sample, logits, **columns))
                bench.add("sampling", f"{name} {rows} x {vocab}", us=round(1e6 * seconds, 1))
            sort = bench.seconds(partial(softmax_and_sort, logits))
            bench.add("sampling", f"torch softmax and sort {rows} x {vocab}", us=round(1e6 * sort, 1))


# Seconds that each may take: what has not begun by then is left out. Together under ten minutes.
SECTIONS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "ceilings": (ceilings, 15),
    "correctness": (correctness, 60),
    "decode": (decode, 90),
    "prefill": (prefill, 60),
    "attention": (attention, 60),
    "elementwise": (elementwise, 15),
    "sampling": (sampling, 45),
    "step": (decode_step, 60),
    "serving": (serving, 75),
    "peers": (transformers_batching, 60),
}

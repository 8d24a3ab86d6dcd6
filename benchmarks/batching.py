"""What continuous batching pays: the same requests served all at once, one after another, and as one padded batch.

    python -m benchmarks.batching [--requests 64] [--dtype bfloat16] [--skip-transformers] [--json FILE]

All three run the default model on this machine, one after the other, in one run. "At once" and "one after another" go
through gRPC to `stepwire serve`; "static" is transformers' `generate` over one left-padded batch, where everyone waits
for the longest. Only tokens somebody asked for count.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import grpc

from benchmarks.workload import Item, mixed
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from scheduler_svc.models.store import resolve_model
from tests.e2e.server import Serve, collect, greedy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    items = mixed(args.requests, args.seed)
    model = resolve_model("")
    report: dict[str, object] = {"requests": len(items), "output_tokens": sum(item.num_output for item in items)}
    report["dtype"] = args.dtype
    with (
        tempfile.TemporaryDirectory() as folder,
        Serve(Path(folder), "--model", str(model), "--dtype", args.dtype, "--no-prefix-caching") as serve,
    ):
        asyncio.run(serve_all(serve.addresses[0], mixed(4, args.seed + 1), width=4))
        report["at_once_s"] = asyncio.run(serve_all(serve.addresses[0], items, width=len(items)))
        report["one_after_another_s"] = asyncio.run(serve_all(serve.addresses[0], items, width=1))
    if not args.skip_transformers:
        report["static_batch_s"] = static_batch(model, items, args.dtype)
    summarise(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


async def serve_all(address: str, items: list[Item], width: int) -> float:
    """Seconds to serve `items` with `width` streams open at a time."""
    gate = asyncio.Semaphore(width)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(item: Item) -> None:
            request = greedy(item.prompt, item.num_output, ignore_eos=True)
            request.response.CopyFrom(pb.ResponseOptions(text=False))
            async with gate:
                answer = await collect(stub, request)
            assert len(answer.token_ids) == item.num_output, (len(answer.token_ids), item.num_output)

        begin = time.perf_counter()
        await asyncio.gather(*(one(item) for item in items))
        return time.perf_counter() - begin


def static_batch(model: Path, items: list[Item], dtype: str) -> float:
    """Seconds that transformers' generate needs for one left-padded batch of all items."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    width = max(len(item.prompt) for item in items)
    ids = torch.tensor([[0] * (width - len(item.prompt)) + item.prompt for item in items])
    mask = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in items])
    longest = max(item.num_output for item in items)
    begin = time.perf_counter()
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - begin
    assert output.shape[1] == width + longest
    return seconds


def summarise(report: dict[str, object]) -> None:
    tokens = float(report["output_tokens"])  # type: ignore[arg-type]
    best = tokens / float(report["at_once_s"])  # type: ignore[arg-type]
    print(f"{report['requests']} requests, {tokens:.0f} output tokens, {report['dtype']}")
    for key, label in (
        ("at_once_s", "Stepwire, all at once"),
        ("one_after_another_s", "Stepwire, one after another"),
        ("static_batch_s", "transformers, one static batch"),
    ):
        if key in report:
            seconds = float(report[key])  # type: ignore[arg-type]
            report[key.removesuffix("_s") + "_tok_s"] = rate = tokens / seconds
            print(f"  {label:31} {seconds:7.1f} s  {rate:7.0f} tok/s  at once is {best / rate:5.2f}x")


if __name__ == "__main__":
    main()

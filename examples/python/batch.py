"""Answers a file of prompts: python examples/python/batch.py IN.jsonl OUT.jsonl [--concurrency 64]

A row of IN is a JSON object with `prompt` (text) or `messages` (a chat: [{"role": ..., "content": ...}, ...]), and if
it likes an `id` of its own (else the line's number) and `max_tokens`. A row of OUT has the id, the text, why it ended
and the usage; or the id and `error`. Rows come in the order in which they end.

Run it again and it goes on: rows that OUT answers are skipped, those with an error are tried again. Stop it with Ctrl-C
whenever you like.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub

# A full queue or a server that is away is waited for by gRPC itself, for as long as the server's answer advises.
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "stepwire.inference.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.5s",
                "maxBackoff": "10s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
CHANNEL_OPTIONS = (("grpc.enable_retries", 1), ("grpc.service_config", json.dumps(SERVICE_CONFIG)))
TIMEOUT_S = 3600


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read as they are needed: the file may be larger than memory."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                row = json.loads(line)
                yield {"id": number, **row}


def answered(path: Path) -> set[Any]:
    """Ids that need no answer any more. A last line that was cut off (a crash, a full disk) is removed."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    results = map(json.loads, whole.splitlines())
    return {result["id"] for result in results if "error" not in result}


async def ask(stub: InferenceServiceStub, row: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The answer to one row, as a row of OUT."""
    stopping = pb.StoppingCriteria(max_tokens=row.get("max_tokens", max_tokens))
    text = ""
    try:
        if "messages" in row:
            messages = [pb.ChatMessage(**message) for message in row["messages"]]
            stream = stub.Chat(pb.ChatRequest(messages=messages, stopping=stopping), timeout=TIMEOUT_S)
        else:
            stream = stub.Generate(pb.GenerateRequest(text=row["prompt"], stopping=stopping), timeout=TIMEOUT_S)
        async for message in stream:
            text += message.text
            if message.finish_reason:
                reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
                usage = {"prompt_tokens": message.usage.prompt_tokens, "tokens": message.usage.completion_tokens}
                return {"id": row["id"], "text": text, "finish_reason": reason, **usage}
        return {"id": row["id"], "error": "the stream ended without a word"}
    except grpc.aio.AioRpcError as error:
        return {"id": row["id"], "error": f"{error.code().name}: {error.details()}"}
    except (KeyError, TypeError, ValueError) as error:
        return {"id": row["id"], "error": f"the row is not as it should be: {error!r}"}


async def results(
    stub: InferenceServiceStub, todo: Iterator[dict[str, Any]], concurrency: int, max_tokens: int
) -> AsyncIterator[dict[str, Any]]:
    """Never more than `concurrency` at once: enough to fill the server's batch, no more than its queue takes."""
    running: set[asyncio.Task[dict[str, Any]]] = set()
    try:
        for row in todo:
            running.add(asyncio.create_task(ask(stub, row, max_tokens)))
            if len(running) >= concurrency:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        for task in asyncio.as_completed(running):
            yield await task
    finally:
        for task in running:
            task.cancel()  # which cancels the call, which frees its blocks on the server


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="IN.jsonl")
    parser.add_argument("target", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    done = answered(options.target)
    total = sum(1 for _ in rows(options.source))
    todo = (row for row in rows(options.source) if row["id"] not in done)
    num_errors = num_tokens = 0
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    with bar, options.target.open("a", encoding="utf-8") as target:
        progress = bar.add_task("", total=total, completed=len(done))
        async with grpc.aio.insecure_channel(options.address, CHANNEL_OPTIONS) as channel:
            stub = InferenceServiceStub(channel)
            async for result in results(stub, todo, options.concurrency, options.max_tokens):
                target.write(json.dumps(result, ensure_ascii=False) + "\n")
                target.flush()
                num_errors += "error" in result
                num_tokens += result.get("tokens", 0)
                bar.update(progress, advance=1, description=f"{num_tokens} tokens, {num_errors} errors")
    print(f"{total} rows: {len(done)} were there, {num_errors} errors, {num_tokens} tokens")
    return 1 if num_errors else 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)

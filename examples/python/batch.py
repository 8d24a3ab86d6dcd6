"""Answers a file of prompts: python examples/python/batch.py IN.jsonl OUT.jsonl [--concurrency 64]

A row of IN is a JSON object with `prompt` (text) or `messages` (a chat: [{"role": ..., "content": ...}, ...]), and if
it likes an `id` of its own (text or a number, else the line's number) and `max_tokens`. A row of OUT has the id, the
text, why it ended and the usage; or the id and `error`, also for a row that cannot be read or has the id of an earlier
one. Rows come in the order in which they end.

Run it again and it goes on: rows that OUT answers are skipped, those with an error are tried again. Stop it with Ctrl-C
whenever you like.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
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
MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True)
class Row:
    id: Any
    content: dict[str, Any]
    problem: str = ""  # why it cannot be asked


def rows(path: Path) -> Iterator[Row]:
    """Read as they are needed: the file may be larger than memory. Only the ids are kept."""
    first: dict[Any, int] = {}  # id -> the line that has it
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = parse(number, line)
            if not row.problem and first.setdefault(row.id, number) != number:
                row = Row(row.id, {}, f"line {number} has the id of line {first[row.id]}: give it one of its own")
            yield row


def parse(number: int, line: bytes) -> Row:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Row(number, {}, f"line {number} is not JSON: {error}")
    if not isinstance(content, dict):
        return Row(number, {}, f"line {number} is not a JSON object")
    row_id = content.get("id", number)
    if type(row_id) not in (str, int, float):
        return Row(number, {}, f"line {number} has an id that is neither text nor a number")
    return Row(row_id, content)


def answered(path: Path) -> set[Any]:
    """Ids that need no answer any more. A last line that was cut off (a crash, a full disk) is removed."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        results = [json.loads(line) for line in whole.splitlines()]
        ids = {result["id"] for result in results if "error" not in result}
    except (ValueError, TypeError, KeyError):
        raise SystemExit(f"batch.py: {path} is there, but holds no answers of this program: name another") from None
    if len(whole) < len(data):
        path.write_bytes(whole)
    return ids


async def ask(stub: InferenceServiceStub, row: Row, default_max_tokens: int) -> dict[str, Any]:
    """The answer to one row, as a row of OUT."""
    if row.problem:
        return {"id": row.id, "error": row.problem}
    text = ""
    try:
        async for message in stream(stub, row.content, default_max_tokens):
            text += message.text
            if message.finish_reason:
                reason = pb.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
                usage = {"prompt_tokens": message.usage.prompt_tokens, "tokens": message.usage.completion_tokens}
                return {"id": row.id, "text": text, "finish_reason": reason, **usage}
        return {"id": row.id, "error": "the stream ended without a word"}
    except grpc.aio.AioRpcError as error:
        return {"id": row.id, "error": f"{error.code().name}: {error.details()}"}
    except (TypeError, ValueError) as error:
        return {"id": row.id, "error": f"the row is not as it should be: {error}"}


def stream(
    stub: InferenceServiceStub, content: dict[str, Any], default_max_tokens: int
) -> AsyncIterator[pb.GenerateResponse]:
    """Raises ValueError or TypeError for what cannot be sent."""
    max_tokens = content.get("max_tokens", default_max_tokens)
    if type(max_tokens) is not int or not 0 <= max_tokens <= MAX_UINT32:
        raise ValueError(f"max_tokens is {max_tokens!r}, but must be a whole number within 0..{MAX_UINT32}")
    stopping = pb.StoppingCriteria(max_tokens=max_tokens)
    if "messages" in content:
        messages = [pb.ChatMessage(**message) for message in content["messages"]]
        return stub.Chat(pb.ChatRequest(messages=messages, stopping=stopping), timeout=TIMEOUT_S)
    if "prompt" in content:
        return stub.Generate(pb.GenerateRequest(text=content["prompt"], stopping=stopping), timeout=TIMEOUT_S)
    raise ValueError("it has neither prompt nor messages")


async def results(
    stub: InferenceServiceStub, todo: Iterator[Row], concurrency: int, max_tokens: int
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


async def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="IN.jsonl")
    parser.add_argument("target", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    if not 0 <= options.max_tokens <= MAX_UINT32:
        parser.error(f"--max-tokens is {options.max_tokens}, but must be within 0..{MAX_UINT32}")
    try:
        return await answer(options)
    except OSError as error:
        print(f"batch.py: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


async def answer(options: argparse.Namespace) -> int:
    """The exit status: 1 if a row has an error."""
    done = answered(options.target)
    is_there = [not row.problem and row.id in done for row in rows(options.source)]
    todo = (row for row in rows(options.source) if row.problem or row.id not in done)
    num_errors = num_tokens = 0
    bar = Progress(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    # A lone surrogate, which JSON can name and UTF-8 cannot, is written as JSON names it.
    with bar, options.target.open("a", encoding="utf-8", errors="backslashreplace") as target:
        progress = bar.add_task("", total=len(is_there), completed=sum(is_there))
        async with grpc.aio.insecure_channel(options.address, CHANNEL_OPTIONS) as channel:
            stub = InferenceServiceStub(channel)
            async for result in results(stub, todo, options.concurrency, options.max_tokens):
                target.write(json.dumps(result, ensure_ascii=False) + "\n")
                target.flush()
                num_errors += "error" in result
                num_tokens += result.get("tokens", 0)
                bar.update(progress, advance=1, description=f"{num_tokens} tokens, {num_errors} errors")
    print(f"{len(is_there)} rows: {sum(is_there)} were there, {num_errors} errors, {num_tokens} tokens")
    return 1 if num_errors else 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except KeyboardInterrupt:
        sys.exit(130)

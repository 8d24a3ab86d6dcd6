"""The load client, a process of its own: sends requests when they are due, notes when every token arrived.

    python -m benchmarks.client < job.json > answers.json

Job: {"address", "items": [{"due_s", "prompt", "num_output"}]}. Answers, in the order of the items: {"due_s", "stamps":
[[seconds since the start, tokens in the message], ...]}. Knows nothing of servers, workloads or statistics.
"""

import asyncio
import json
import sys
import time
from typing import Any

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc

CONNECT_LIMIT_S = 30.0


def request_of(item: dict[str, Any]) -> pb.GenerateRequest:
    """Greedy, exactly `num_output` tokens, ids only."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=item["prompt"]),
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StoppingCriteria(max_tokens=item["num_output"], ignore_eos=True),
        response=pb.ResponseOptions(text=False),
    )


async def send(job: dict[str, Any]) -> list[dict[str, Any]]:
    requests = [request_of(item) for item in job["items"]]  # made before the clock starts
    async with grpc.aio.insecure_channel(job["address"]) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_LIMIT_S)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        begin = time.perf_counter()

        async def one(item: dict[str, Any], request: pb.GenerateRequest) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, begin + item["due_s"] - time.perf_counter()))
            stamps = [
                (time.perf_counter() - begin, len(message.token_ids))
                async for message in stub.Generate(request)
                if message.token_ids
            ]
            if sum(count for _, count in stamps) != item["num_output"]:
                raise SystemExit(f"asked for {item['num_output']} tokens, got {stamps}")
            return {"due_s": item["due_s"], "stamps": stamps}

        return await asyncio.gather(*(one(*pair) for pair in zip(job["items"], requests, strict=True)))


if __name__ == "__main__":
    json.dump(asyncio.run(send(json.load(sys.stdin))), sys.stdout)

"""Many answers at once over one connection: python examples/python/many_streams.py [--address HOST:PORT] PROMPT ...

Each stream is one asyncio task. The server batches them at every step, so that sixty-four together take little longer
than one; a client has nothing to do for it but ask for them at the same time.
"""

import argparse
import asyncio
import sys
import time

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub

PROMPTS = ("The sea is", "A good name for a cat is", "Bread is made of", "The first thing I do in the morning is")


async def answer(stub: InferenceServiceStub, prompt: str, max_tokens: int) -> int:
    """Streams one answer and prints it when it is whole; returns its number of tokens."""
    request = pb.GenerateRequest(text=prompt, stopping=pb.StoppingCriteria(max_tokens=max_tokens))
    began, first, text, num_tokens = time.monotonic(), 0.0, "", 0
    # Leaving this loop early, by `break`, an exception or a cancelled task, ends the request on the server too.
    async for message in stub.Generate(request, timeout=300):
        first = first or time.monotonic() - began
        text += message.text
        num_tokens += len(message.token_ids)
    print(f"[first token after {first:.2f} s] {prompt}{text!r}", flush=True)
    return num_tokens


async def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS, metavar="PROMPT")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=40)
    options = parser.parse_args(arguments)
    if not 0 <= options.max_tokens <= 2**32 - 1:
        parser.error(f"--max-tokens is {options.max_tokens}, but must be within 0..{2**32 - 1}")
    # One channel is one HTTP/2 connection; thousands of streams fit on it. Make it once and keep it.
    async with grpc.aio.insecure_channel(options.address) as channel:
        stub = InferenceServiceStub(channel)
        began = time.monotonic()
        try:
            counts = await asyncio.gather(*(answer(stub, prompt, options.max_tokens) for prompt in options.prompts))
        except grpc.aio.AioRpcError as error:
            # Leaving the channel ends the streams that still run.
            print(f"many_streams.py: {options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    seconds = time.monotonic() - began
    print(f"{len(counts)} answers, {sum(counts)} tokens, {sum(counts) / seconds:.0f} tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""An answer that outlives its connection: python examples/python/resume.py [--address HOST:PORT] PROMPT

The server itself carries a stream over the death of an executor or a scheduler; a client only sees a pause. What ends a
stream with UNAVAILABLE is the death of the frontend it came through, of the network, or of the whole service. Two
things help, and they meet where the first token has come:

1. before it, gRPC asks again by itself, as the retry policy below says;
2. after it, gRPC must not (it would begin anew), so we ask for the rest: the prompt with the tokens we hold is the
   prompt of the next request. The prefix cache often still has most of it.

The rest of a greedy answer (temperature 0) is exactly what it would have been. A drawn one goes on as likely as before,
but with other dice: noise is keyed by the place in the output, and the new request begins at place 0. For the same
reason presence and frequency penalties begin anew, and a stop string across the seam is not seen.
"""

import argparse
import asyncio
import json
import random
import sys

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub

# gRPC's own retries. UNAVAILABLE: nobody there, or draining. RESOURCE_EXHAUSTED: the queue is full. When the server
# says how long to wait (it does, with both), that is what gRPC waits instead of the backoff.
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": "stepwire.inference.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    # A server that comes back is found again within a second, not within two minutes.
    ("grpc.max_reconnect_backoff_ms", 1000),
)
RESUMES = 10
SILENT_S = 1.0  # who waits longer for the server is told


async def generate(stub: InferenceServiceStub, prompt: str, max_tokens: int) -> pb.FinishReason:
    """Prints the answer as it comes, over as many interruptions as it takes; returns why it ended."""
    # Token ids, not text, are what a stream can be continued from: text may be cut in the middle of a token.
    asked = stub.Tokenize(pb.TokenizeRequest(text=prompt), timeout=60, wait_for_ready=True)
    prompt_ids = list((await asked).token_ids)
    beginning = await text_of(stub, prompt_ids)
    output: list[int] = []
    text, num_shown = "", 0
    for attempt in range(RESUMES + 1):
        request = pb.GenerateRequest(
            # No request_id: the one before may be live until its frontend's lease ends, and would be ALREADY_EXISTS.
            token_ids=pb.TokenIds(ids=prompt_ids + output),
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StoppingCriteria(max_tokens=max_tokens - len(output)),
        )
        try:
            async for message in stub.Generate(request, timeout=600, wait_for_ready=True):
                output += message.token_ids
                text += message.text
                print(text[num_shown:], end="", flush=True)
                num_shown = max(num_shown, len(text))
                if message.finish_reason:
                    return message.finish_reason
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE or attempt == RESUMES:
                raise
            print(f"[interrupted after {len(output)} tokens: {error.details()}]", file=sys.stderr, flush=True)
        # Everybody who was interrupted comes back: not all in the same moment.
        await asyncio.sleep(random.uniform(0.1, 0.5))
        # Of the last tokens the text may not have come: what the tokens say is what counts. Half a character at the end
        # is asked for again.
        text = (await text_of(stub, prompt_ids + output)).removeprefix(beginning)
        while output and text.endswith("\ufffd"):
            output.pop()
            text = (await text_of(stub, prompt_ids + output)).removeprefix(beginning)
        if len(output) >= max_tokens:
            return pb.FINISH_REASON_LENGTH  # only the word of the end was lost
    raise AssertionError("unreachable: the last attempt returns or raises")


async def text_of(stub: InferenceServiceStub, token_ids: list[int]) -> str:
    """Asked of whichever server is there again."""
    answer = await stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=60, wait_for_ready=True)
    return answer.text


async def reach(channel: grpc.aio.Channel, address: str, limit_s: float) -> bool:
    """Whether a server answers within the limit."""
    ready = asyncio.ensure_future(channel.channel_ready())
    done, _ = await asyncio.wait({ready}, timeout=min(SILENT_S, limit_s))
    if not done and limit_s > SILENT_S:
        print(f"[nothing answers on {address} yet: waiting up to {limit_s:g} s]", file=sys.stderr, flush=True)
        done, _ = await asyncio.wait({ready}, timeout=limit_s - SILENT_S)
    ready.cancel()
    return bool(done)


async def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="for a server to be there")
    options = parser.parse_args(arguments)
    if not 0 <= options.max_tokens <= 2**32 - 1:
        parser.error(f"--max-tokens is {options.max_tokens}, but must be within 0..{2**32 - 1}")
    async with grpc.aio.insecure_channel(options.address, CHANNEL_OPTIONS) as channel:
        if not await reach(channel, options.address, options.wait):
            print(f"resume.py: nothing answered on {options.address} in {options.wait:g} s", file=sys.stderr)
            return 1
        try:
            finished = await generate(InferenceServiceStub(channel), options.prompt, options.max_tokens)
        except grpc.aio.AioRpcError as error:
            print(f"\nresume.py: {options.address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"\n[{pb.FinishReason.Name(finished)}]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

"""The clients of `benchmarks.gpu_serving`, in a process of their own: streams of random ids over one frontend session.

    python -m benchmarks.gpu_load ENDPOINT --streams 64 --prompt 512 --output 256 --vocab 128256

Prints one JSON object: seconds from the first submit to the last token, output tokens, and seconds to the last first
token. Greedy, no end token: every stream gets what it asks for.
"""

import argparse
import asyncio
import json
import sys
import time

import numpy as np

from protos.stepwire.wire.v1 import session_pb2, step_pb2
from scheduler_svc.links.session import RequestStream, SchedulerSession

FINGERPRINT = "random"
LIMIT_S = 240.0


async def run(options: argparse.Namespace) -> dict[str, float]:
    session = SchedulerSession(options.endpoint, fingerprint=FINGERPRINT)
    await session.start()
    changed = asyncio.Event()
    session.on_change(changed.set)
    try:
        while not session.ready:
            changed.clear()
            await changed.wait()
        began = time.perf_counter()
        streams = [session.submit(submit) for submit in requests(options)]
        ended = await asyncio.gather(*(follow(stream) for stream in streams))
        seconds = time.perf_counter() - began
    finally:
        await session.close()
    first = max(moment for _, moment in ended) - began
    return {"seconds": seconds, "tokens": sum(count for count, _ in ended), "last_first_token_s": first}


def requests(options: argparse.Namespace) -> list[session_pb2.Submit]:
    draw = np.random.default_rng(options.seed)
    prompts = draw.integers(0, options.vocab, (options.streams, options.prompt)).astype("<i4")
    return [
        session_pb2.Submit(
            request_id=f"{options.seed}-{index}",
            prompt_token_ids=prompt.tobytes(),
            max_tokens=options.output,
            num_choices=1,
            sampling=step_pb2.Sampling(repetition_penalty=1.0, top_p=1.0),
        )
        for index, prompt in enumerate(prompts)
    ]


async def follow(stream: RequestStream) -> tuple[int, float]:
    """(tokens, when the first one came)."""
    count, first = 0, float("nan")
    while deltas := await stream.read():
        first = time.perf_counter() if not count else first
        count += sum(len(delta.token_ids) for delta in deltas)
    return count, first


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_load", description=__doc__.splitlines()[0])
    parser.add_argument("endpoint")
    for name in ("streams", "prompt", "output", "vocab", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(asyncio.wait_for(run(options), LIMIT_S))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

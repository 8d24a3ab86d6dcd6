"""smg's cache-aware policy before two services that share nothing: prompts go to the one whose prefix index has them.

The services are two schedulers with a simulated executor each, so who holds a prefix is for the test to say.
"""

from pathlib import Path

import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.server import Serve
from tests.gateways.conftest import smg_in_front_of
from tests.gateways.gateway import Gateway, until

MODEL = "SmolLM2-135M-Instruct"
# Some 80 tokens each, five blocks, with nothing in common.
PROMPTS = [" ".join(f"{word} {number}" for number in range(20)) for word in ("red", "green", "blue", "white")]


def cached_tokens(smg: Gateway, prompt: str) -> int:
    status, answer = smg.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def warm(serve: Serve, prompt: str) -> None:
    with serve.stub() as stub:
        list(stub.Generate(pb.GenerateRequest(text=prompt, stopping=pb.StoppingCriteria(max_tokens=1))))


def blocks_cached(serve: Serve) -> int:
    return serve.wait_idle().blocks_cached


def prompts_computed(serve: Serve) -> int:
    return serve.load().prompt_tokens_total


def test_requests_follow_the_prefix_index(smg_bin: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    services = [
        Serve(folder, "--backend", "simulated", "--num-blocks", "64", env={"XDG_RUNTIME_DIR": str(folder)})
        for folder in folders
    ]
    with services[0] as first, services[1] as second:
        # Before the gateway comes: told by the snapshot. Without it, nothing but chance would bring them together.
        warm(first, PROMPTS[0])
        warm(second, PROMPTS[1])
        addresses = [*first.addresses, *second.addresses]
        with smg_in_front_of(smg_bin, addresses, tmp_path, "--policy", "cache_aware") as smg:
            # While it listens: told as it happens.
            warm(second, PROMPTS[2])
            warm(first, PROMPTS[3])
            until(lambda: smg.metric("smg_kv_index_blocks") == sorted(map(blocks_cached, (first, second))))
            before = [prompts_computed(serve) for serve in (first, second)]
            for prompt in PROMPTS * 2:
                assert cached_tokens(smg, prompt) >= 64, smg.output()[-3000:]
            after = [prompts_computed(serve) for serve in (first, second)]
            assert all(b > a for a, b in zip(before, after, strict=True))
            assert "Learned block_size" in smg.output()
            assert "gap" not in smg.output().lower()

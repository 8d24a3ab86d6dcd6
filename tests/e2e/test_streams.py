"""Many streams, several frontends, cancellations: everyone gets what was asked for, nothing is left behind."""

import random

import grpc
import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.known_answers import ENDLESS, SLOW
from tests.e2e.server import Serve, generate_all, greedy

SEED = 20_241


@pytest.fixture(scope="module")
def serve(tmp_path_factory, default_model):
    folder = tmp_path_factory.mktemp("serve")
    with Serve(folder, "--model", str(default_model), "--backend", "simulated", frontends=2, env=SLOW) as running:
        yield running


def mixed_requests(count: int, seed: int) -> list[pb.GenerateRequest]:
    """Random prompts of 1..300 tokens, 1..200 new ones; every fourth shares a long prefix."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    prefix = [draw.randrange(40_000) for _ in range(100)]
    requests = []
    for i in range(count):
        own = [draw.randrange(40_000) for _ in range(draw.randint(1, 200))]
        requests.append(greedy(prefix + own if i % 4 == 0 else own, draw.randint(1, 200), ignore_eos=True))
    return requests


def test_64_streams_of_mixed_length_get_exactly_the_tokens_asked_for(serve):
    requests = mixed_requests(64, SEED)
    answers = generate_all(serve.addresses[:1], requests)
    for request, answer in zip(requests, answers, strict=True):
        assert len(answer.token_ids) == request.stopping.max_tokens == answer.usage.completion_tokens
        assert answer.finish_reason == pb.FINISH_REASON_LENGTH
        assert answer.usage.prompt_tokens == len(request.token_ids.ids)
    serve.wait_idle()


def test_two_frontends_interleave_and_agree_with_one(serve):
    requests = mixed_requests(40, SEED + 1)
    both = generate_all(serve.addresses, requests)
    one = generate_all(serve.addresses[1:], requests)
    assert [a.token_ids for a in both] == [a.token_ids for a in one]
    with serve.stub(1) as stub:
        assert stub.GetLoad(pb.GetLoadRequest()).num_frontends == 2
    serve.wait_idle()


def test_a_cancelled_stream_frees_its_blocks(serve):
    request = greedy([5] * 200, ENDLESS, ignore_eos=True)
    with serve.stub() as stub:
        call = stub.Generate(request)
        next(call)
        call.cancel()
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
        assert raised.value.code() == grpc.StatusCode.CANCELLED
    serve.wait_idle()


def test_cancel_by_id_through_the_other_frontend(serve):
    request = greedy([6] * 50, ENDLESS, ignore_eos=True)
    request.request_id = "cancel-me"
    with serve.stub(0) as mine, serve.stub(1) as other:
        call = mine.Generate(request)
        first = next(call)
        assert first.request_id == "cancel-me"
        with pytest.raises(grpc.RpcError) as raised:
            next(other.Generate(request))
        assert raised.value.code() == grpc.StatusCode.ALREADY_EXISTS
        other.Cancel(pb.CancelRequest(request_id="cancel-me"))
        last = [*call][-1]
        assert last.finish_reason == pb.FINISH_REASON_CANCELLED
        other.Cancel(pb.CancelRequest(request_id="cancel-me"))
    serve.wait_idle()


def test_a_deadline_ends_the_stream(serve):
    with serve.stub() as stub:
        call = stub.Generate(greedy([7] * 50, ENDLESS, ignore_eos=True), timeout=0.3)
        with pytest.raises(grpc.RpcError) as raised:
            for _ in call:
                pass
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    serve.wait_idle()


def test_n_choices_compute_the_prompt_once(serve):
    request = greedy([8, 9, 10] * 40, 20, ignore_eos=True)
    request.sampling.temperature = 1.0
    request.sampling.seed = 7
    request.sampling.n = 4
    before = serve.load().prompt_tokens_total
    tokens: dict[int, list[int]] = {}
    with serve.stub() as stub:
        for message in stub.Generate(request):
            tokens.setdefault(message.index, []).extend(message.token_ids)
    assert sorted(tokens) == [0, 1, 2, 3]
    assert all(len(ids) == 20 for ids in tokens.values())
    assert len({tuple(ids) for ids in tokens.values()}) == 4
    assert serve.load().prompt_tokens_total - before <= 4 * 120
    serve.wait_idle()

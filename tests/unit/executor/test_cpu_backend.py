"""The cpu backend as a whole: a tiny random model, scheduled at random, against transformers one sequence at a time."""

import random

import numpy as np
import pytest

from executor_svc.config import BackendChoice, Dtype, ExecutorConfig, KVDtype, SizeSettings
from executor_svc.errors import ComputeFault, StartupError
from executor_svc.startup import Startup
from executor_svc.worker import Worker
from tests.unit.executor.plans import ToyScheduler, ToySequence, admit, greedy, ints, plan

torch = pytest.importorskip("torch")

torch.set_num_threads(1)  # with other processes on two cores, two threads wait for each other most of the time

VOCAB = 311


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(directory, the transformers model in it)"""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    return directory, model


def make(directory, dtype: Dtype = Dtype.FLOAT32, **sizes: int):
    from executor_svc.backends.select import make_backend

    settings = SizeSettings(
        **{"num_blocks": 200, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 20} | sizes
    )
    config = ExecutorConfig(directory, BackendChoice.CPU, dtype, sizes=settings, threads=1)
    return make_backend(config, Startup())


def alone(model, prompt: list[int], want: int) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(want):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("seed", range(3))
def test_scheduling_does_not_change_tokens(reference, seed):
    directory, model = reference
    backend = make(directory)
    rng = random.Random(seed)
    sequences = []
    for _ in range(8):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        sequences.append(ToySequence(prompt, len(prompt), rng.randint(1, 10), greedy()))
    worker = Worker(backend)
    worker.reset()
    scheduler = ToyScheduler(rng, backend.geometry, sequences)
    while scheduler.waiting or scheduler.running:
        message, sampled = scheduler.plan()
        result = worker.execute(message)
        assert (result.num_rows, result.num_stored_tokens) == scheduler.digest()
        scheduler.commit(sampled, np.frombuffer(result.token_ids, "<i4").tolist())
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.num_prompt]
        assert sequence.tokens == alone(model, prompt, sequence.want), f"seed {seed}"


def test_a_copied_block_is_as_good_as_a_computed_one(reference):
    directory, model = reference
    worker = Worker(make(directory))
    worker.reset()
    prompt = [5, 17, 200, 3, 99, 41]
    first, second = alone(model, prompt, 2)[-2:]
    worker.execute(plan(1, admit=[admit(0, prompt, [9, 4])], prefill=ints(0, 6)))
    fork = admit(1, prompt, [9, 5], num_computed_tokens=5)
    result = worker.execute(plan(2, admit=[fork], copy=ints(4, 5), prefill=ints(1, 1)))
    assert np.frombuffer(result.token_ids, "<i4").tolist() == [second, first]


def test_a_step_that_draws_nothing(reference):
    worker = Worker(make(reference[0]))
    worker.reset()
    result = worker.execute(plan(1, admit=[admit(0, [1, 2, 3], [0])], prefill=ints(0, 2)))
    assert (result.token_ids, result.num_stored_tokens) == (b"", 2)


def test_logits_that_are_not_finite_are_a_fault(reference):
    backend = make(reference[0])

    class Nonsense:
        def forward(self, batch, kv):
            return torch.full((1, VOCAB), float("nan"))

    backend._decoder = Nonsense()
    worker = Worker(backend)
    with pytest.raises(ComputeFault, match="not finite"):
        worker.execute(plan(1, admit=[admit(0, [1], [0])], prefill=ints(0, 1)))


def test_bfloat16_weights_are_sampled_in_float32(reference, monkeypatch):
    backend = make(reference[0], Dtype.BFLOAT16)
    seen, inner = [], backend._sampler.sample
    monkeypatch.setattr(
        backend._sampler, "sample", lambda logits, batch: seen.append(logits.dtype) or inner(logits, batch)
    )
    worker = Worker(backend)
    asks = greedy(
        temperature=0.8, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.2, seed=1
    )
    message = plan(1, admit=[admit(0, [1, 2, 3], [0], sampling=asks)], prefill=ints(0, 3))
    drawn = np.frombuffer(worker.execute(message).token_ids, "<i4").tolist()
    assert seen == [np.float32]
    assert len(drawn) == 1
    assert 0 <= drawn[0] < VOCAB


def test_a_kv_type_it_does_not_have(reference):
    from executor_svc.backends.select import make_backend

    config = ExecutorConfig(reference[0], BackendChoice.CPU, kv_dtype=KVDtype.FP8)
    with pytest.raises(StartupError, match="--kv-dtype fp8"):
        make_backend(config, Startup())


def test_cuda_without_a_device_says_so(reference):
    from executor_svc.backends.select import make_backend

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(StartupError, match="no CUDA device"):
        make_backend(ExecutorConfig(reference[0], BackendChoice.CUDA), Startup())

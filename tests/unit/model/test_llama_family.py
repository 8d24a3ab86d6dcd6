"""The Llama family against transformers in float32: however the work is cut up, logits and greedy ids are the same."""

import pytest

from executor_svc.model import native_decoder
from executor_svc.model.config import ModelConfig
from tests.unit.model.support import Driver, Row, check_against, load_decoders, make_model, prompt

ROPE = {"rope_theta": 10_000.0}
VARIANTS = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear": ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "yarn": (
        "llama",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True, "hidden_size": 48, "num_attention_heads": 6}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def models(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    model_type, overrides = VARIANTS[request.param]
    reference = make_model(directory, model_type, **overrides)
    config = ModelConfig.from_directory(directory)
    return reference, config, load_decoders(directory, config)


@pytest.fixture(params=["torch", "native"])
def model(request, models):
    reference, config, decoders = models
    if request.param not in decoders:
        pytest.skip(f"no native engine: {native_decoder.unsupported(config) or 'no compiler'}")
    return reference, config, decoders[request.param]


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 1000])
def test_chunked_prefill_then_64_steps(model, chunk):
    reference, config, decoder = model
    check_against(reference, Driver(decoder, config).run(Row(prompt(37)), chunk=chunk, num_outputs=64))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 19, 20, 21, 31, 32, 33])
def test_lengths_around_block_and_window_edges(model, length):
    reference, config, decoder = model
    check_against(reference, Driver(decoder, config).run(Row(prompt(length)), chunk=1000, num_outputs=3))


def test_prefix_computed_by_another_row(model):
    reference, config, decoder = model
    driver = Driver(decoder, config)
    first = driver.run(Row(prompt(40)), chunk=1000, num_outputs=2)
    second = Row(prompt(32)[:32] + prompt(9, seed=1), blocks=first.blocks[:2], computed=32)
    second.tokens[:32] = first.tokens[:32]
    driver.run(second, chunk=1000, num_outputs=20)
    check_against(reference, second)


def test_mixed_batch(model):
    reference, config, decoder = model
    driver = Driver(decoder, config)
    rows = [Row(prompt(length, seed=length)) for length in (1, 16, 17, 50)]
    driver.step([(rows[0], 1), (rows[1], 16), (rows[2], 5)])
    driver.step([(rows[0], 1), (rows[1], 1), (rows[2], 12), (rows[3], 33)])
    driver.step([(rows[0], 1), (rows[1], 1), (rows[2], 1), (rows[3], 17)])
    for _ in range(10):
        driver.step([(row, 1) for row in rows])
    for row in rows:
        check_against(reference, row)

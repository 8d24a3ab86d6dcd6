"""Every other family of the table against transformers in float32: prefill, chunks, decode, and a mixed batch."""

import pytest

from executor_svc.model import native_decoder
from executor_svc.model.config import ModelConfig
from tests.unit.model.support import Driver, Row, check_against, load_decoders, make_model, prompt

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {"hidden_size": 64, "head_dim": None}  # families without a head_dim of their own
VARIANTS = {
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1], "sliding_window": None}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 20, "layer_types": ALTERNATING, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 20,
            "layer_types": ALTERNATING,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("phi3", {**SIZES, "sliding_window": 20}),
    "phi3_partial": (
        "phi3",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            **SIZES,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "olmo2": ("olmo2", {**SIZES}),
    "granite": (
        "granite",
        {
            **SIZES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.5,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
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


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_prefill_then_64_steps(model, chunk):
    reference, config, decoder = model
    check_against(reference, Driver(decoder, config).run(Row(prompt(37)), chunk=chunk, num_outputs=64))


@pytest.mark.parametrize("length", [1, 16, 17, 20, 21, 33])
def test_lengths_around_block_and_window_edges(model, length):
    reference, config, decoder = model
    check_against(reference, Driver(decoder, config).run(Row(prompt(length)), chunk=1000, num_outputs=3))


def test_mixed_batch(model):
    reference, config, decoder = model
    driver = Driver(decoder, config)
    rows = [Row(prompt(length, seed=length)) for length in (1, 17, 50)]
    driver.step([(rows[0], 1), (rows[1], 5)])
    driver.step([(rows[0], 1), (rows[1], 12), (rows[2], 33)])
    driver.step([(rows[0], 1), (rows[1], 1), (rows[2], 17)])
    for _ in range(8):
        driver.step([(row, 1) for row in rows])
    for row in rows:
        check_against(reference, row)

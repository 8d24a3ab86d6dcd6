"""A tiny model of each family, written as llama.cpp writes it, converted, loaded by transformers: the same logits."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler_svc.errors import StartupError
from scheduler_svc.models.convert import convert_gguf
from scheduler_svc.models.progress import silent
from tests.unit.models.gguf_builder import tiny_model, write_model

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope(**parameters):
    return {"rope_parameters": {"rope_theta": 50000.0, **parameters}}


def convert(tmp_path, model, keys=None, **options):
    source = write_model(tmp_path / "tiny.gguf", model, keys, **options)
    directory = tmp_path / "out"
    directory.mkdir()
    convert_gguf(source, directory, silent, {})
    return directory


def logits(model):
    ids = (torch.arange(40) * 37 % 96)[None]
    with torch.no_grad():
        return model(input_ids=ids).logits


def assert_same(tmp_path, model, keys=None, **options):
    loaded = AutoModelForCausalLM.from_pretrained(convert(tmp_path, model, keys, **options), dtype=torch.float32)
    assert set(loaded.state_dict()) == set(model.state_dict())
    # Everything is exact but the norms of Gemma, which the file holds as w + 1.
    tolerance = 1e-5 if model.config.model_type.startswith("gemma") else 0.0
    torch.testing.assert_close(logits(loaded), logits(model), rtol=tolerance, atol=tolerance)
    return loaded.config


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(tmp_path, tied, kv_heads):
    model = tiny_model("llama", tie_word_embeddings=tied, num_key_value_heads=kv_heads, **rope(rope_type="default"))
    config = assert_same(tmp_path, model, {"rope.freq_base": 50000.0})
    assert config.tie_word_embeddings is tied
    assert config.rope_parameters["rope_theta"] == 50000.0


def test_llama_with_attention_bias(tmp_path):
    model = tiny_model("llama", attention_bias=True)
    # The family's converter leaves o_proj.bias out only if it is not there: it is, under its own name.
    assert_same(tmp_path, model, {"rope.freq_base": 10000.0})


def test_llama_with_heads_wider_than_hidden(tmp_path):
    assert_same(tmp_path, tiny_model("llama", head_dim=32))


def test_llama3_scaling_comes_back_from_its_factors(tmp_path):
    model = tiny_model("llama", head_dim=64, max_position_embeddings=131072, **rope(rope_type="llama3", **LLAMA3))
    plain = 1.0 / 50000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    tensors = {"rope_freqs.weight": factors}
    config = assert_same(tmp_path, model, {"rope.freq_base": 50000.0}, extra_tensors=tensors)
    assert {key: config.rope_parameters[key] for key in LLAMA3} == LLAMA3


def test_other_rotary_factors_are_refused(tmp_path):
    tensors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(StartupError, match="rotary factors"):
        convert(tmp_path, tiny_model("llama"), extra_tensors=tensors)


def test_linear_scaling(tmp_path):
    model = tiny_model("llama", **rope(rope_type="linear", factor=4.0))
    keys = {"rope.freq_base": 50000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert_same(tmp_path, model, keys)


def test_yarn_scaling(tmp_path):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32}
    keys = {
        "rope.freq_base": 50000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    assert_same(tmp_path, tiny_model("qwen2", **rope(rope_type="yarn", **yarn)), keys)


def test_longrope_scaling(tmp_path):
    short, long = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
    parameters = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    parameters |= {"original_max_position_embeddings": 32}
    model = tiny_model("phi3", rope_parameters=parameters, original_max_position_embeddings=32)
    tensors = {
        "rope_factors_long.weight": np.array(long, np.float32),
        "rope_factors_short.weight": np.array(short, np.float32),
    }
    keys = {"rope.freq_base": 10000.0, "rope.scaling.original_context_length": 32}
    assert_same(tmp_path, model, keys, extra_tensors=tensors)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "phi3", "smollm3"])
def test_families(tmp_path, family):
    model = tiny_model(family, num_hidden_layers=5 if family == "smollm3" else 2, **rope(rope_type="default"))
    assert_same(tmp_path, model, {"rope.freq_base": 50000.0})


def test_granite(tmp_path):
    scales = {
        "attention_multiplier": 0.11,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 5.0,
    }
    keys = {"attention.scale": 0.11, "embedding_scale": 3.0, "residual_scale": 0.22, "logit_scale": 5.0}
    assert_same(tmp_path, tiny_model("granite", **scales), keys)


def test_gemma2(tmp_path):
    # The default head size of 256 decides query_pre_attn_scalar, which no file holds.
    model = tiny_model("gemma2", head_dim=32, query_pre_attn_scalar=32, sliding_window=16)
    keys = {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    assert_same(tmp_path, model, keys)


def test_gemma3(tmp_path):
    model = tiny_model("gemma3_text", head_dim=32, query_pre_attn_scalar=32, sliding_window=16, num_hidden_layers=7)
    assert_same(tmp_path, model, {"attention.sliding_window": 16, "rope.freq_base": 1000000.0})


def test_agrees_with_transformers_own_reading_of_the_file(tmp_path):
    model = tiny_model("llama", **rope(rope_type="default"))
    directory = convert(tmp_path, model, {"rope.freq_base": 50000.0, "vocab_size": 96})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters"):
        assert getattr(ours.config, key) == getattr(theirs.config, key), key


@pytest.mark.parametrize("missing", ["output_norm.weight", "blk.1.ffn_down.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path, missing):
    with pytest.raises(StartupError, match=r"lacks the tensor|no tensor"):
        convert(tmp_path, tiny_model("llama"), skip=(missing,))


def test_metadata_that_contradicts_the_tensors(tmp_path):
    model = tiny_model("llama")
    model.config.intermediate_size = 256
    with pytest.raises(StartupError, match=r"shape \[64, 128\], its metadata says \[64, 256\]"):
        convert(tmp_path, model)


def test_unknown_architecture_is_named_with_the_known_ones(tmp_path):
    model = tiny_model("llama")
    source = write_model(tmp_path / "tiny.gguf", model)
    data = source.read_bytes().replace(b"llama", b"lhama")
    source.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(StartupError, match=r"'lhama' is not supported.*gemma2.*llama.*qwen3"):
        convert_gguf(source, tmp_path / "out", silent, {})
    assert list((tmp_path / "out").iterdir()) == []

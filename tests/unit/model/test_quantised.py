"""Quantised checkpoints: written by independent code, loaded by ours, against transformers on the weights they mean."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc import startup
from executor_svc.backends.weights_report import num_parameters, report
from executor_svc.errors import StartupError
from executor_svc.model.config import ModelConfig
from executor_svc.model.load import load_model
from tests.unit.model import quantising
from tests.unit.model.support import TINY, Driver, Row, check_against, load_decoders, make_model, prompt

GROUP = quantising.GROUP


def compressed(kind: str, weights: dict, layout: str, **more) -> dict:
    weights = {"type": kind, "dynamic": False, "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"config_groups": {"group_0": group}, "format": layout, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **config, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "strategy": "channel"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 20], "activation_scheme": "dynamic"}
CASES = {
    "awq": (quantising.awq, AWQ),
    "gptq": (quantising.gptq, GPTQ),
    "gptq v2": (partial(quantising.gptq, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq 8 bits": (partial(quantising.gptq, bits=8), {**GPTQ, "bits": 8, "checkpoint_format": "gptq"}),
    "gptq 2 bits": (partial(quantising.gptq, bits=2), {**GPTQ, "bits": 2}),
    "gptq reordered": (partial(quantising.gptq, reorder=True), {**GPTQ, "desc_act": True}),
    "packed int4": (quantising.compressed_packed, compressed("int", INT4, "pack-quantized")),
    "packed int4 with zeros": (
        partial(quantising.compressed_packed, symmetric=False),
        compressed("int", {**INT4, "symmetric": False}, "pack-quantized"),
    ),
    "packed int8": (
        partial(quantising.compressed_packed, bits=8, group=None),
        compressed("int", INT8, "pack-quantized"),
    ),
    "int8": (quantising.compressed_int8, compressed("int", INT8, "int-quantized")),
    "int8 with zeros": (
        partial(quantising.compressed_int8, symmetric=False),
        compressed("int", {**INT8, "symmetric": False}, "int-quantized"),
    ),
    "compressed fp8": (
        partial(quantising.fp8, shared="channel"),
        compressed("float", {"num_bits": 8, "strategy": "channel"}, "float-quantized"),
    ),
    "compressed fp8 in blocks": (
        partial(quantising.fp8, shared="block"),
        compressed("float", {"num_bits": 8, "strategy": "block", "block_structure": [24, 20]}, "float-quantized"),
    ),
    "nvfp4": (
        quantising.nvfp4,
        compressed("float", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
    ),
    "fp8 in blocks": (partial(quantising.fp8, name="weight_scale_inv", shared="block"), BLOCKS),
    "fp8": (quantising.fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (partial(quantising.fp8, shared="channel"), {"quant_method": "fbgemm_fp8"}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(directory, transformers' instance) of a model whose linear layers the tests quantise."""
    directory = tmp_path_factory.mktemp("plain")
    return directory, make_model(directory, "qwen2", num_hidden_layers=2)


def write(tiny, directory, writer, config: dict, *, head: bool = False) -> None:
    quantising.write_quantised(*tiny, directory, writer, config, head=head)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_it_means(tiny, tmp_path, case):
    writer, config = CASES[case]
    write(tiny, tmp_path, writer, config)
    for decoder in load_decoders(tmp_path, ModelConfig.from_directory(tmp_path)).values():
        driver = Driver(decoder, decoder.config)
        check_against(tiny[1], driver.run(Row(prompt(23)), chunk=1000, num_outputs=4))


def edit(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def load(directory):
    return load_model(directory, ModelConfig.from_directory(directory), dtype="float32", use_native=False)


def test_the_head_may_be_quantised_too(tiny, tmp_path):
    write(tiny, tmp_path, partial(quantising.compressed_packed, bits=8, group=None), CASES["packed int8"][1], head=True)
    decoder = load(tmp_path)
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(9)), chunk=1000, num_outputs=2))


def test_layers_of_one_model_may_be_stored_in_several_ways(tiny, tmp_path):
    def writer(weight, rng):  # down_proj is the only layer of 48 inputs
        return quantising.compressed_packed(weight, rng, bits=8 if weight.shape[1] == 48 else 4)

    config = compressed("int", INT4, "pack-quantized")
    down = {"targets": ["re:.*down_proj$"], "weights": {**INT4, "num_bits": 8}}
    config["config_groups"]["group_1"] = down
    write(tiny, tmp_path, writer, config)
    decoder = load(tmp_path)
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(9)), chunk=1000, num_outputs=2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; supported: awq, gptq"),
        ({"bits": 4}, "quant_method None"),
        ("awq", "quantization_config is 'awq'"),
        ({**AWQ, "version": "gemv"}, "awq with version 'gemv' is not supported; supported: gemm"),
        ({**AWQ, "bits": 8}, "awq with bits 8"),
        ({**AWQ, "bits": True}, "awq with bits True"),
        ({**AWQ, "zero_point": False}, "awq with zero_point False"),
        ({**AWQ, "group_size": 0}, "awq with group_size 0"),
        ({**AWQ, "group_size": 1 << 40}, "awq with group_size 1099511627776"),
        ({**GPTQ, "bits": 3}, "gptq with bits 3 is not supported; supported: 2, 4, 8"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*mlp": {}}}, "gptq with dynamic"),
        ({**GPTQ, "group_size": "128"}, "gptq with group_size '128'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt 'e5m2'"),
        ({**BLOCKS, "weight_block_size": [0, 128]}, r"fp8 with weight_block_size \[0, 128\]"),
        (compressed("int", INT4, "marlin-24"), "compressed-tensors with format 'marlin-24'"),
        (compressed("float", {"num_bits": 4}, "mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized'"),
        (compressed("int", {**INT4, "num_bits": 3}, "pack-quantized"), "num_bits 3"),
        (compressed("int", {**INT4, "strategy": "token"}, "pack-quantized"), "strategy 'token'"),
        (compressed("float", {"num_bits": 8, "strategy": "block"}, "float-quantized"), "block_structure None"),
        (compressed("int", INT4, "pack-quantized", sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (compressed("int", INT4, "pack-quantized", transform_config={"config_groups": {"a": 1}}), "transform_config"),
        (compressed("int", INT4, "pack-quantized", config_groups={}), "config_groups"),
        (compressed("int", INT4, "pack-quantized", config_groups={"a": {"targets": ["re:("], "weights": INT4}}), "re:"),
        (
            compressed("int", INT4, "pack-quantized", config_groups={"a": {"targets": ["re:(a+)+$"], "weights": INT4}}),
            "none of a group",
        ),
        (
            compressed(
                "int", INT4, "pack-quantized", config_groups={"a": {"targets": ["re:.*.*.*.*.*x"], "weights": INT4}}
            ),
            "at most 4 repetitions",
        ),
    ],
)
def test_what_is_not_supported_is_named(config, message):
    raw = {**TINY, "architectures": ["LlamaForCausalLM"], "quantization_config": config}
    with pytest.raises(StartupError, match=message):
        ModelConfig.from_dict(raw)


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("case", "name", "value", "message"),
    [
        ("awq", "qweight", torch.zeros(32, 5, dtype=torch.int32), r"qweight' has shape \[32, 5\]"),
        ("awq", "qweight", torch.zeros(32, 6), "qweight' is stored as F32, not as I32"),
        ("awq", "qzeros", None, "lacks tensor 'model.layers.1.mlp.up_proj.qzeros'"),
        ("awq", "scales", torch.zeros(4, 48), r"scales' has shape \[4, 48\]"),
        ("gptq", "g_idx", torch.full((32,), 2, dtype=torch.int32), "g_idx holds 2..2; there are 2 groups"),
        ("gptq", "g_idx", torch.full((32,), -1, dtype=torch.int32), "g_idx holds -1..-1"),
        ("gptq reordered", "g_idx", None, "lacks tensor 'model.layers.1.mlp.up_proj.g_idx'"),
        ("packed int4", "weight_shape", torch.tensor([32, 48]), r"weight_shape is \[32, 48\]"),
        ("packed int4 with zeros", "weight_zero_point", None, "weight_zero_point"),
        ("int8", "weight_scale", torch.zeros(48, 2), "weight_scale' has shape"),
        ("int8", "weight", torch.zeros(48, 32, dtype=torch.int16), "stored as I16"),
        ("fp8", "weight_scale", None, "is fp8, but there is no"),
        ("fp8 in blocks", "weight_scale_inv", torch.zeros(2, 1), r"has shape \[2, 1\]; config.json implies \[2, 2\]"),
    ],
)
def test_tensors_that_do_not_fit(tiny, tmp_path, case, name, value, message):
    writer, config = CASES[case]
    write(tiny, tmp_path, writer, config)
    edit(tmp_path, lambda t: t.pop(f"{UP}.{name}") if value is None else t.update({f"{UP}.{name}": value}))
    with pytest.raises(StartupError, match=message):
        load(tmp_path)


def test_a_group_size_that_does_not_divide_the_inputs(tiny, tmp_path):
    write(tiny, tmp_path, quantising.awq, {**AWQ, "group_size": 24})
    with pytest.raises(StartupError, match="has 32 inputs, no multiple of group_size 24"):
        load(tmp_path)


def test_long_loading_says_how_far_it_is(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(startup, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(startup.Startup, "note", lambda self, line: said.append(line))
    show = startup.Startup().progress("layer")
    for done in range(1, 13):
        now[0] += 1.0
        show(done, 12)
    assert said == ["layer 5 of 12", "layer 10 of 12"]


def test_what_is_about_to_be_loaded_is_said(tiny, tmp_path):
    write(tiny, tmp_path, quantising.awq, AWQ)
    config = ModelConfig.from_directory(tmp_path)
    parameters = sum(p.numel() for name, p in tiny[1].named_parameters() if p.ndim > 1)
    assert num_parameters(config) == parameters
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    line = report(tmp_path, config, "bfloat16", 3 << 30, "memory")
    assert f"{stored / 1024:.1f} KiB on disk (awq, 4 bits, groups of 16)" in line
    assert f"{parameters * 2 / 1024:.1f} KiB as bfloat16" in line
    assert line.endswith("3.0 GiB of memory are free")

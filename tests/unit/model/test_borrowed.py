"""Architectures outside the table: transformers' modules over our pages give transformers' own logits, or a refusal."""

import ast
import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.backends.select import make_backend
from executor_svc.config import BackendChoice, Dtype, ExecutorConfig, SizeSettings
from executor_svc.errors import StartupError
from executor_svc.model import native
from executor_svc.model.borrowed.description import describe, longest_position
from executor_svc.model.borrowed.interface import CannotBorrow, attend
from executor_svc.model.borrowed.load import num_stored
from executor_svc.model.borrowed.self_check import check_itself
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.load import computed_type, load_model, read_model
from executor_svc.startup import Startup
from executor_svc.worker import Worker
from tests.unit.executor.plans import ToyScheduler, ToySequence, greedy
from tests.unit.model import quantising
from tests.unit.model.quantising import write_quantised
from tests.unit.model.support import TINY, Driver, Row, check_against, make_model, prompt

SMALL = {"num_hidden_layers": 2}
VARIANTS = {
    "gpt_neox": ("gpt_neox", SMALL),  # partial rotary embeddings, parallel branches, layer norms
    "starcoder2": ("starcoder2", {**SMALL, "sliding_window": 20}),
    "opt": ("opt", SMALL),  # learned positions
    "gpt_oss": (  # attention sinks, every other layer within a window, experts
        "gpt_oss",
        {**SMALL, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (  # values narrower than keys, experts
        "deepseek_v3",
        {
            **{**SMALL, "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"moe_intermediate_size": 16},
        },
    ),
}


def load(directory, dtype="float32"):
    return load_model(directory, read_model(directory), dtype=dtype)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def model(request, tmp_path_factory):
    """(transformers' instance, our decoder, its directory)"""
    directory = tmp_path_factory.mktemp(request.param)
    model_type, overrides = VARIANTS[request.param]
    reference = make_model(directory, model_type, **overrides)
    return reference, load(directory), directory


@pytest.fixture
def neox(tmp_path):
    """(transformers' instance, its directory) of a fresh tiny GPT-NeoX."""
    return make_model(tmp_path, "gpt_neox", **SMALL), tmp_path


@pytest.mark.parametrize("chunk", [3, 16, 1000])
def test_chunked_prefill_then_32_steps(model, chunk):
    reference, decoder, _ = model
    check_against(reference, Driver(decoder, decoder.config).run(Row(prompt(37)), chunk=chunk, num_outputs=32))


def test_prefix_computed_by_another_row(model):
    reference, decoder, _ = model
    driver = Driver(decoder, decoder.config)
    first = driver.run(Row(prompt(40)), chunk=1000, num_outputs=2)
    second = Row(first.tokens[:32] + prompt(9, seed=1), blocks=first.blocks[:2], computed=32)
    check_against(reference, driver.run(second, chunk=1000, num_outputs=32))


def test_mixed_batch_and_preemption(model):
    reference, decoder, _ = model
    driver = Driver(decoder, decoder.config)
    rows = [Row(prompt(length, seed=length)) for length in (1, 17, 50)]
    driver.step([(rows[0], 1), (rows[1], 5)])
    driver.step([(rows[0], 1), (rows[1], 12), (rows[2], 33)])
    driver.step([(rows[0], 1), (rows[1], 1), (rows[2], 17)])
    for _ in range(10):
        driver.step([(row, 1) for row in rows])
    rows[1].blocks, rows[1].computed = [], 0  # what it had is forgotten, what it said is known
    driver.step([(rows[0], 1), (rows[1], 9)])
    driver.step([(rows[0], 1), (rows[1], len(rows[1].tokens) - 9), (rows[2], 1)])
    for _ in range(20):
        driver.step([(row, 1) for row in rows])
    for row in rows:
        check_against(reference, row)


class Notes(Startup):
    """Keeps what the operator would see."""

    def __init__(self):
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def test_the_cpu_backend_serves_it(model):
    reference, _, directory = model
    sizes = SizeSettings(num_blocks=200, block_size=4, max_num_seqs=6, max_num_batched_tokens=20)
    config = ExecutorConfig(directory, BackendChoice.CPU, Dtype.FLOAT32, sizes=sizes, threads=1)
    notes, rng = Notes(), random.Random(5)
    backend = make_backend(config, notes)
    assert backend.identity.architecture == type(reference).__name__
    order = [next(i for i, line in enumerate(notes.lines) if part in line) for part in ("M parameters: ", "loading")]
    assert order == sorted(order)
    sequences = [ToySequence(prompt(n, seed=n), n, 6, greedy()) for n in (1, 9, 30)]
    worker = Worker(backend)
    worker.reset()
    scheduler = ToyScheduler(rng, backend.geometry, sequences)
    while scheduler.waiting or scheduler.running:
        message, sampled = scheduler.plan()
        scheduler.commit(sampled, np.frombuffer(worker.execute(message).token_ids, "<i4").tolist())
    for sequence in sequences:
        with torch.inference_mode():
            choices = reference(torch.tensor([sequence.tokens])).logits[0].argmax(-1).tolist()
        assert sequence.tokens[sequence.num_prompt :] == choices[sequence.num_prompt - 1 : -1]


def test_half_precision(neox):
    reference, directory = neox
    decoder = load(directory, "bfloat16")
    assert decoder.kv_dtype == torch.bfloat16
    check_against(
        reference.to(torch.bfloat16), Driver(decoder, decoder.config).run(Row(prompt(9)), chunk=4, num_outputs=1),
        tolerance=0.05,
    )  # fmt: skip


@pytest.mark.parametrize("fast_bf16", [False, True])
@pytest.mark.parametrize("engine_widens", [False, True])
def test_the_fastest_type_depends_on_who_computes(monkeypatch, fast_bf16, engine_widens):
    monkeypatch.setattr(native, "has_fast_bf16", lambda: fast_bf16)
    monkeypatch.setattr(native, "prefers_bf16", lambda: fast_bf16 or engine_widens)
    by_torch = "bfloat16" if fast_bf16 else "float32"
    by_engine = "bfloat16" if fast_bf16 or engine_widens else "float32"
    raw = {**TINY, "architectures": ["LlamaForCausalLM"]}
    assert computed_type(ModelConfig.from_dict(raw), "auto") == by_engine
    assert computed_type(ModelConfig.from_dict({**raw, "head_dim": 18}), "auto") == by_torch
    described = describe(config_of("gpt_neox", "GPTNeoXForCausalLM"), "config.json")
    assert computed_type(described, "auto") == computed_type(described, "int8") == by_torch
    assert computed_type(described, "float16") == "float16"


def test_int8_is_for_our_own_decoders(model):
    sizes = SizeSettings(num_blocks=8, block_size=4)
    config = ExecutorConfig(model[2], BackendChoice.CPU, Dtype.INT8, sizes=sizes, threads=1)
    notes = Notes()
    backend = make_backend(config, notes)
    assert backend.identity.dtype in ("bfloat16", "float32")
    assert any(line.endswith(f"computed in {backend.identity.dtype}") for line in notes.lines)


@pytest.mark.parametrize("head", [False, True])
def test_quantised_weights(tmp_path, head):
    plain, directory = tmp_path / "plain", tmp_path / "quantised"
    reference = make_model(plain, "starcoder2", **SMALL, tie_word_embeddings=False)
    directory.mkdir()
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}
    # The head of 97 rows does not fit into integers of eight fields.
    writer = partial(quantising.gptq, reorder=True)
    if head:
        config, writer = {"quant_method": "fbgemm_fp8"}, partial(quantising.fp8, shared="channel")
    write_quantised(plain, reference, directory, writer, config, head=head)
    described = read_model(directory)
    assert num_stored(Checkpoint(directory), described.quantised) == sum(p.numel() for p in reference.parameters())
    decoder = load(directory)
    check_against(reference, Driver(decoder, decoder.config).run(Row(prompt(20)), chunk=7, num_outputs=4))


# ---- what cannot work says why -------------------------------------------------------------------------------------


def config_of(model_type: str, architecture: str, **more) -> dict:
    return {**TINY, "model_type": model_type, "architectures": [architecture], **more}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (config_of("t5", "T5ForConditionalGeneration"), "an encoder and a decoder"),
        (config_of("bert", "BertModel"), "no causal language model"),
        (config_of("mamba", "MambaForCausalLM"), "state|linear_attention"),
        (config_of("rwkv", "RwkvForCausalLM"), "a state that is no KV cache"),
        (config_of("llama4_text", "Llama4ForCausalLM", layer_types=["chunked_attention"] * 3), "'chunked_attention'"),
        (config_of("bloom", "BloomForCausalLM"), "cannot be told the positions"),
        (config_of("grok9", "Grok9ForCausalLM"), "has no model_type 'grok9'$"),
        (config_of("grok9", "Grok9ForCausalLM", auto_map={"AutoConfig": "x.X"}), "code of the model's folder is never"),
        ({"architectures": ["X"]}, "no model_type None"),
        (
            config_of("gpt_neox", "GPTNeoXForCausalLM", quantization_config={"quant_method": "hqq"}),
            "quant_method 'hqq'",
        ),
        (config_of("gpt_neox", "GPTNeoXForCausalLM", num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
        (config_of("gpt_neox", "GPTNeoXForCausalLM", vocab_size=1 << 40), "vocab_size is 1099511627776"),
        (config_of("gpt_neox", "GPTNeoXForCausalLM", hidden_size="wide"), "hidden_size|transformers refuses it"),
        (config_of("gpt_neox", "GPTNeoXForCausalLM", max_position_embeddings=1), "max_position_embeddings is 1"),
    ],
)
def test_refusals_from_the_config_alone(raw, message):
    with pytest.raises(StartupError, match=message):
        describe(raw, "config.json")


def test_positions_end_where_scaling_by_length_begins():
    scaled = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    for parameters in (scaled, {"full_attention": scaled, "sliding_attention": {"rope_type": "default"}}):
        text = SimpleNamespace(max_position_embeddings=131_072, rope_parameters=parameters)
        assert longest_position(text, "config.json") == 4096
    plain = SimpleNamespace(max_position_embeddings=131_072, rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert longest_position(plain, "config.json") == 131_072


def test_a_mask_that_is_not_causal_is_seen_at_once(tmp_path):
    make_model(tmp_path, "bert", **SMALL)
    with pytest.raises(StartupError, match="neither causal nor a sliding window"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"position_bias": torch.ones(1)}, "takes 'position_bias'"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": None}, "masks of its own"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "masks of its own"),
        ({"value": torch.zeros(1, 2, 4, 16)}, "heads do not fit"),
    ],
)
def test_attention_that_ours_does_not_do(more, message):
    heads = {name: torch.zeros(1, 2, 4, 8) for name in ("query", "key", "value")}
    given = {"module": torch.nn.Identity(), **heads, "attention_mask": torch.zeros(1, dtype=torch.int64), **more}
    with pytest.raises(CannotBorrow, match=message):
        attend(**given)


def test_a_model_whose_tokens_see_their_neighbours_in_the_batch_is_found_out(neox):
    decoder = load(neox[1])
    check_itself(decoder)
    mlp = decoder.model.gpt_neox.layers[0].mlp
    handle = mlp.register_forward_hook(lambda module, inputs, output: output + 0.2 * output.roll(1, dims=1))
    with pytest.raises(StartupError, match="computed in pieces over pages its logits are others"):
        check_itself(decoder)
    handle.remove()
    check_itself(decoder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("gpt_neox.layers.1.mlp.dense_4h_to_h.bias"), "lacks tensor.*dense_4h_to_h.bias"),
        (lambda t: t.update({"gpt_neox.layers.1.odd": torch.ones(3)}), "does not belong.*layers.1.odd"),
        (
            lambda t: t.update({"gpt_neox.layers.1.mlp.dense_4h_to_h.bias": torch.ones(31)}),
            "another shape.*dense_4h_to_h.bias",
        ),
    ],
)
def test_tensors_that_do_not_fit(neox, change, message):
    file = neox[1] / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    with pytest.raises(StartupError, match=message):
        load(neox[1])


def test_masks_and_frequencies_of_old_checkpoints_are_passed_over(neox):
    file = neox[1] / "model.safetensors"
    tables = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1),
    }
    save_file({**load_file(file), **tables}, file)
    decoder = load(neox[1])
    check_against(neox[0], Driver(decoder, decoder.config).run(Row(prompt(9)), chunk=4, num_outputs=1))


def test_a_config_larger_than_its_checkpoint_allocates_nothing(neox):
    file = neox[1] / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 1 << 23}))
    with pytest.raises(StartupError, match=r"implies [\d,]+ parameters, the checkpoint holds"):
        load(neox[1])


def test_code_in_a_model_folder_is_never_run(neox):
    reference, directory = neox
    ran = directory / "ran"
    for name in ("modeling_x.py", "configuration_x.py", "custom_generate/generate.py", "__init__.py"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"open({str(ran)!r}, 'w').close()\n")
    file = directory / "config.json"
    traps = {
        "auto_map": {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"},
        "attn_implementation": "somebody/kernels",
        "_attn_implementation": "somebody/kernels",
        "transformers_weights": "../weights.bin",
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), **traps}))
    decoder = load(directory)
    assert not ran.exists()
    check_against(reference, Driver(decoder, decoder.config).run(Row(prompt(9)), chunk=4, num_outputs=1))


def test_transformers_is_imported_when_it_is_needed_and_not_before():
    root = Path(__file__).parents[3] / "executor_svc"
    importers = [
        file.relative_to(root).as_posix()
        for file in sorted(root.rglob("*.py"))
        for node in ast.parse(file.read_text()).body  # what stands in a function waits
        if isinstance(node, ast.Import | ast.ImportFrom) and "transformers" in ast.unparse(node)
    ]
    assert importers == []

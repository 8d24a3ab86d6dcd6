"""The default model as it is fetched and converted on a fresh machine, against transformers reading the same GGUF."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scheduler_svc.models.convert import convert_gguf
from scheduler_svc.models.default_model import default_gguf
from scheduler_svc.models.progress import silent

PROMPTS = ["The capital of France is", "12345 + 67890 =", "Once upon a time"]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(converted directory, folder with the GGUF file)"""
    folder = tmp_path_factory.mktemp("default")
    directory = folder / "converted"
    directory.mkdir()
    with default_gguf(folder, silent) as source:
        convert_gguf(source, directory, silent, {})
        yield directory, source


# Transformers takes a minute to read the file; tests/unit/models compares its reading of a small one with ours.
@pytest.mark.slow
def test_weights_and_greedy_ids_are_those_of_transformers(both):
    directory, source = both
    ours = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        drawn = [model.generate(ids, do_sample=False, max_new_tokens=8).tolist() for model in (ours, theirs)]
        assert drawn[0] == drawn[1], prompt


def test_config_and_tokenizer_are_the_original_models(both):
    directory, _ = both
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = model.config
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert (config.rms_norm_eps, config.max_position_embeddings, config.tie_word_embeddings) == (1e-5, 8192, True)
    ids = model.generation_config
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, 2, 2)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12345").input_ids) == list("12345")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]

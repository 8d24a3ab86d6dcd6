"""What the end-to-end tests share: the default model, and transformers' answers as the oracle."""

import json
from pathlib import Path

import pytest

from scheduler_svc.models.store import resolve_model

MAX_TOKENS = 32

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three laws of thermodynamics are",
    "12345 + 67890 =",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,",
    "A recipe for pancakes: you need",
    "In 1969, the first human",
    "Le chat est assis sur",
    "The opposite of hot is",
    "To be or not to be,",
    "import numpy as np\n\n",
    "Water boils at",
    "Q: What is the largest planet?\nA:",
    "My favourite season is autumn because",
    "The quick brown fox",
    "List of colours: red, green,",
    "When the train arrived at the station, nobody",
    "Gravity is a force that" + " pulls things down, and it" * 12,
]


@pytest.fixture(scope="session")
def default_model() -> Path:
    return resolve_model("")


@pytest.fixture(scope="session")
def prompt_ids(default_model: Path) -> list[list[int]]:
    """The prompts as transformers' own tokenizer encodes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="session")
def oracle(default_model: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    """transformers' own greedy ids in float32, up to an end of sequence; its batch is padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    eos = json.loads((default_model / "generation_config.json").read_text())["eos_token_id"]
    width = max(map(len, prompt_ids))
    padded = [[0] * (width - len(ids)) + ids for ids in prompt_ids]
    present = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
    with torch.inference_mode():
        output = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(present),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=eos,
        )
    answers = []
    for ids in output[:, width:].tolist():
        ends = [at for at, token in enumerate(ids) if token in (eos if isinstance(eos, list) else [eos])]
        answers.append(ids[: ends[0] + 1] if ends else ids)
    return answers

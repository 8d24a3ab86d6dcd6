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
    """transformers' own greedy ids in float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()
    eos = json.loads((default_model / "generation_config.json").read_text())["eos_token_id"]
    answers = []
    for ids in prompt_ids:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=eos,
            )
        answers.append(output[0, len(ids) :].tolist())
    return answers

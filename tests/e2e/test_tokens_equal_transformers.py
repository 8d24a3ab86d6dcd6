"""The tokens are right: float32 greedy ids equal transformers', however the work is cut into steps."""

import pytest

from protos.stepwire.inference.v1 import inference_pb2 as pb
from tests.e2e.conftest import MAX_TOKENS, PROMPTS
from tests.e2e.server import Serve, generate_all, greedy

# 20 prompts of up to 80 tokens and 32 new ones want about 60 blocks of 16 at once: 24 is too few for them all.
SMALL_POOL = 24

SHAPES = {
    "as shipped": [],
    "depth 1": ["--pipeline-depth", "1"],
    "chunks of 16": ["--max-num-batched-tokens", "16"],
    "no prefix caching": ["--no-prefix-caching"],
    "pool too small for all": ["--num-blocks", str(SMALL_POOL), "--block-size", "16"],
    "small pool, depth 1, no prefix caching": [
        *("--num-blocks", str(SMALL_POOL), "--block-size", "16", "--pipeline-depth", "1", "--no-prefix-caching")
    ],
}
# One thing at a time, where the last of them has it too.
SLOW = {"depth 1", "no prefix caching", "pool too small for all"}


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.slow] if shape in SLOW else []) for shape in SHAPES]
)
def test_greedy_ids_equal_transformers(shape, tmp_path, default_model, oracle):
    requests = [greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]
    with Serve(tmp_path, "--model", str(default_model), "--dtype", "float32", *SHAPES[shape]) as serve:
        if "pool" in shape:  # answers of one token teach the scheduler to admit more than will fit
            generate_all(serve.addresses, [greedy(prompt, 1) for prompt in PROMPTS * 3])
        at_once = generate_all(serve.addresses, requests)
        again = generate_all(serve.addresses, requests)
        load = serve.wait_idle()
    for answers in (at_once, again):
        assert [answer.token_ids for answer in answers] == oracle
    assert load.blocks_total >= load.blocks_cached
    if "pool" in shape:
        assert sum(answer.usage.num_preemptions for answer in at_once) > 0


def test_alone_equals_at_once(tmp_path, default_model, prompt_ids, oracle):
    with Serve(tmp_path, "--model", str(default_model), "--dtype", "float32") as serve:
        alone = [generate_all(serve.addresses, [greedy(ids, MAX_TOKENS)])[0] for ids in prompt_ids]
    assert [answer.token_ids for answer in alone] == oracle


def test_text_is_what_transformers_decodes(tmp_path, default_model, prompt_ids, oracle):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model)
    with Serve(tmp_path, "--model", str(default_model), "--dtype", "float32") as serve:
        answers = generate_all(serve.addresses, [greedy(prompt, MAX_TOKENS) for prompt in PROMPTS])
    for ids, expected, answer in zip(prompt_ids, oracle, answers, strict=True):
        before = tokenizer.decode(ids, skip_special_tokens=True)
        after = tokenizer.decode(ids + expected, skip_special_tokens=True)
        assert answer.text == after[len(before) :]
        stopped = expected[-1] == tokenizer.eos_token_id
        assert answer.finish_reason == (pb.FINISH_REASON_STOP if stopped else pb.FINISH_REASON_LENGTH)

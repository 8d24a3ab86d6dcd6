"""How much of a device's memory the KV pool gets; the device's own answers are arguments here."""

import pytest
import torch

from executor_svc.backends.cuda_memory import SET_ASIDE, draft_geometry, kv_block_bytes, kv_budget
from executor_svc.config import SizeSettings
from executor_svc.errors import StartupError
from executor_svc.geometry import GIB, Defaults
from executor_svc.model.config import ModelConfig

MODEL = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
)
DEFAULTS = Defaults(block_size=16, max_num_seqs=256, max_num_batched_tokens=8192)


def test_the_pool_gets_what_our_share_has_left() -> None:
    # Of 80 GiB, 10 are kept from us; 60 are free after the weights, a step takes 3.
    assert (
        kv_budget(60 * GIB, 80 * GIB, working=3 * GIB, utilization=0.875) == 60 * GIB - 10 * GIB - 3 * GIB - SET_ASIDE
    )
    assert kv_budget(60 * GIB, 80 * GIB, working=3 * GIB, utilization=1.0) == 60 * GIB - 3 * GIB - SET_ASIDE


def test_a_share_that_holds_no_pool_is_refused_with_the_way_out() -> None:
    least = 2 * GIB + SET_ASIDE
    assert kv_budget(least + 1, 80 * GIB, working=2 * GIB, utilization=1.0) == 1
    with pytest.raises(StartupError, match=r"3\.0 GiB of device memory are free, 3\.0 GiB .*--max-num-batched-tokens"):
        kv_budget(least, 80 * GIB, working=2 * GIB, utilization=1.0)


def test_the_draft_is_the_largest_step_over_one_block() -> None:
    draft = draft_geometry(SizeSettings(), DEFAULTS, MODEL)
    assert (draft.num_blocks, draft.block_size, draft.vocab_size) == (1, 16, 128)
    assert (draft.max_num_seqs, draft.max_model_len, draft.max_num_batched_tokens) == (256, 4096, 8192)
    asked = SizeSettings(block_size=32, max_num_seqs=3, max_model_len=100, max_num_batched_tokens=64)
    draft = draft_geometry(asked, DEFAULTS, MODEL)
    assert (draft.block_size, draft.max_num_seqs, draft.max_model_len, draft.max_num_batched_tokens) == (32, 3, 100, 64)


@pytest.mark.parametrize(
    ("dtype", "vector"), [(torch.bfloat16, 32), (torch.float32, 64), (torch.int8, 20), (torch.float8_e4m3fn, 20)]
)
def test_a_block_is_keys_and_values_of_all_layers_and_their_scales(dtype: torch.dtype, vector: int) -> None:
    assert kv_block_bytes(MODEL, 16, dtype) == 3 * 2 * 16 * 2 * vector

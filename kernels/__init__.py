"""Triton kernels for a paged language model. A leaf: knows torch and triton, and nothing of plans, rows or requests.

`reference.py` says what each computes, in plain torch; the kernels say it fast. Every attention kernel reads the
cache through a block table, in the layout of `PagedKV`. Index work is done once per step (`plan_prefill`), kernels
run once per layer.

    from kernels.paged import PagedKV, AttentionSpec                                       the nouns
    from kernels.rope_cache import rope_and_cache                                          rotate, store keys and values
    from kernels.attention_prefill import plan_prefill, block_q_for, prefill_attention     many new tokens per sequence
    from kernels.attention_decode import DecodeWorkspace, num_splits, decode_attention     one new token per sequence
    from kernels.norm_act import rms_norm, gated_activation                                between matrix products
"""

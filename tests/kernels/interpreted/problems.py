"""Random paged problems with every trap set: unowned blocks and tails are NaN, tables are padded with ids that do not
exist, outputs start as NaN and have guard rows around them.
"""

from dataclasses import dataclass

import torch

from kernels import reference
from kernels.paged import QUANT_LIMIT, AttentionSpec, PagedKV

# Relative L2 error allowed against float64: about twice the worst seen, and that is the rounding of the type itself.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
OUT_OF_RANGE = 2**30


@dataclass
class Problem:
    q: torch.Tensor
    kv: PagedKV
    spec: AttentionSpec
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor

    def expected(self) -> torch.Tensor:
        return reference.paged_attention(
            self.q,
            self.kv,
            self.spec,
            block_table=self.block_table,
            cu_seqlens=self.cu_seqlens,
            seq_lens=self.seq_lens,
        )


def poisoned_kv(shape: tuple[int, int, int, int], dtype: torch.dtype) -> PagedKV:
    kv = PagedKV.empty(shape, dtype, "cpu")
    if dtype in QUANT_LIMIT:
        kv.cache.view(torch.uint8).fill_(0x7F)  # NaN in both float8 types, the largest value in int8
        kv.scale.fill_(float("nan"))
    else:
        kv.cache.fill_(float("nan"))
    return kv


def make_problem(
    seed: int,
    lens: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (3, 1),
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    spec: AttentionSpec | None = None,
) -> Problem:
    """`lens` = (new tokens, tokens known) of each sequence; `heads` = (Hq, Hkv)."""
    generator = torch.Generator().manual_seed(seed)
    q_heads, kv_heads = heads
    counts = [-(-known // block_size) for _, known in lens]
    num_blocks = sum(counts) + 3
    kv = poisoned_kv((num_blocks, block_size, kv_heads, head_size), kv_dtype or dtype)
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.full((len(lens), max([*counts, 1]) + 2), OUT_OF_RANGE, dtype=torch.int32)
    taken = 0
    for b, (_, known) in enumerate(lens):
        blocks = order[taken : taken + counts[b]]
        taken += counts[b]
        table[b, : counts[b]] = blocks
        position = torch.arange(known)
        slots = blocks[position // block_size] * block_size + position % block_size
        keys, values = torch.randn((2, known, kv_heads, head_size), generator=generator)
        reference.write_cache(kv, keys, values, slots)
    new = torch.tensor([new for new, _ in lens])
    q = torch.randn((int(new.sum()), q_heads, head_size), generator=generator).to(dtype)
    return Problem(
        q=q,
        kv=kv,
        spec=spec or AttentionSpec(scale=head_size**-0.5),
        block_table=table,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int(),
        seq_lens=torch.tensor([known for _, known in lens], dtype=torch.int32),
    )


def guarded_like(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, inner): inner has x's shape and is NaN; whole has a row of sevens before and after it."""
    whole = torch.full((x.shape[0] + 2, *x.shape[1:]), 7.0, dtype=x.dtype)
    whole[1:-1] = float("nan")
    return whole, whole[1:-1]


def assert_guards(whole: torch.Tensor) -> None:
    assert bool((whole[0] == 7).all())
    assert bool((whole[-1] == 7).all())


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert not bool(actual.isnan().any()), "NaN reached the output"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} exceeds {tolerance:.0e}"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=8 * tolerance, atol=8 * tolerance)

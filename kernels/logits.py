"""From raw logits to the logits that are drawn from, and what is read off the raw ones.

    argmax:     the lowest id among the largest logits      lse: log sum_v e^x_v      so that  logprob(v) = x_v - lse
    edits:      x + value of single ids, while the row has fewer than `until` output tokens (bias; bans are -inf)
    repetition: x > 0 ? x / r : x * r                        of tokens seen in the prompt or the output
    frequency:  x - f * count         presence: x - p        of tokens in the output
    allowed:    -inf for ids that are not in the row's bit mask

Everything is float32 and in place. R rows of the device's tables, B drawing rows of a step, V vocabulary.
"""

import torch
import triton
import triton.language as tl

# Columns read at once, and by how many warps.
BLOCK = 4096
NUM_WARPS = 8
# A token's entry in the table of counts: how often it is in the output, plus this if it is in the prompt.
IN_PROMPT = 1 << 24
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def argmax_kernel(logits_ptr, ids_ptr, max_ptr, lse_ptr, stride_logits, V: tl.constexpr, BLOCK: tl.constexpr):
    """Program b: row b, one pass. An online sum: a new maximum rescales what was summed."""
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    best_id = 0
    total = 0.0
    for start in range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride_logits + col, mask=col < V, other=float("-inf")).to(tl.float32)
        top, where = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        new = tl.maximum(best, top)
        # A row that is -inf so far has summed nothing; -inf - -inf would be NaN.
        ref = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(best - ref) + tl.sum(tl.exp(x - ref), 0)
        best_id = tl.where(top > best, start + where, best_id)
        best = new
    tl.store(ids_ptr + row, best_id)
    tl.store(max_ptr + row, best)
    tl.store(lse_ptr + row, best + tl.log(total))


@torch.no_grad()
def argmax_lse(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row of `logits` [B, V], any float type: (ids int32 [B], largest logit [B], log-sum-exp [B])."""
    batch, vocab = logits.shape
    ids = torch.empty(batch, dtype=torch.int32, device=logits.device)
    largest, lse = torch.empty((2, batch), dtype=torch.float32, device=logits.device)
    argmax_kernel[(batch,)](logits, ids, largest, lse, logits.stride(0), V=vocab, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return ids, largest, lse


@triton.jit(do_not_specialize=["length", "amount"], do_not_specialize_on_alignment=["counts_ptr", "tokens_ptr"])
def count_kernel(counts_ptr, tokens_ptr, length, amount, BLOCK: tl.constexpr):
    """Program i: BLOCK of the tokens. Tokens repeat, so additions are atomic."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + at, mask=at < length, other=0)
    tl.atomic_add(counts_ptr + token, tl.full([BLOCK], 1, tl.int32) * amount, mask=at < length)


@torch.no_grad()
def count_tokens(counts: torch.Tensor, tokens: torch.Tensor, *, in_prompt: bool) -> None:
    """Add `tokens` int32 [n] of one sequence to its `counts` int32 [V]; prompt tokens count IN_PROMPT each."""
    if len(tokens):
        grid = (triton.cdiv(len(tokens), 1024),)
        count_kernel[grid](counts, tokens, len(tokens), IN_PROMPT if in_prompt else 1, BLOCK=1024, num_warps=4)


@triton.jit
def count_drawn_kernel(counts_ptr, rows_ptr, tokens_ptr, V: tl.constexpr):
    """Program b: row rows[b] has drawn tokens[b]; row -1 is padding."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    at = counts_ptr + row * V + tl.load(tokens_ptr + tl.program_id(0))
    tl.store(at, tl.load(at, mask=row >= 0, other=0) + 1, mask=row >= 0)


@torch.no_grad()
def count_drawn(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Count the token each row has just drawn: counts int32 [R, V], distinct rows int32 [B] (-1: none), tokens [B]."""
    count_drawn_kernel[(len(rows),)](counts, rows, tokens, V=counts.shape[1], num_warps=1)


@triton.jit
def penalty_kernel(
    logits_ptr,
    rows_ptr,
    penalties_ptr,
    counts_ptr,
    allowed_ptr,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (b, i): columns [i * BLOCK, (i + 1) * BLOCK) of drawing row b. Rows that ask for nothing cost a load."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    # presence, frequency, repetition, has a mask
    penalties = penalties_ptr + row * 4
    presence = tl.load(penalties)
    frequency = tl.load(penalties + 1)
    repetition = tl.load(penalties + 2)
    masked = tl.load(penalties + 3) != 0
    penalised = (presence != 0) | (frequency != 0) | (repetition != 1)
    if not (penalised | masked):
        return
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + tl.program_id(0).to(tl.int64) * V + col
    x = tl.load(at, mask=col < V, other=0.0)
    if penalised:
        count = tl.load(counts_ptr + row * V + col, mask=col < V, other=0)
        drawn = count % IN_PROMPT
        # A ban stays what it is; anything else stays finite.
        scaled = tl.maximum(tl.minimum(tl.where(x > 0, x / repetition, x * repetition), LARGEST), -LARGEST)
        x = tl.where((count > 0) & (x > float("-inf")), scaled, x)
        x = x - frequency * drawn.to(tl.float32) - tl.where(drawn > 0, presence, 0.0)
    if masked:
        word = tl.load(allowed_ptr + row * WORDS + col // 32, mask=col < V, other=0)
        x = tl.where(((word >> (col % 32)) & 1) != 0, x, float("-inf"))
    tl.store(at, x, mask=col < V)


@triton.jit
def edit_kernel(
    logits_ptr, rows_ptr, num_outputs_ptr, num_edits_ptr, ids_ptr, values_ptr, until_ptr,
    V: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b: the edits of drawing row b. Additions are atomic: an id may be both biased and banned."""
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    if row < 0:
        return
    num_edits = tl.load(num_edits_ptr + row)
    num_outputs = tl.load(num_outputs_ptr + row)
    for start in range(0, num_edits, BLOCK):
        i = start + tl.arange(0, BLOCK)
        token = tl.load(ids_ptr + row * E + i, mask=i < num_edits, other=0)
        value = tl.load(values_ptr + row * E + i, mask=i < num_edits, other=0.0)
        until = tl.load(until_ptr + row * E + i, mask=i < num_edits, other=0)
        at = logits_ptr + tl.program_id(0).to(tl.int64) * V + token
        tl.atomic_add(at, value, mask=(i < num_edits) & (num_outputs < until))


class LogitRules:
    """Per row, on the device: what `apply_rules` does to its logits. The owner writes rows; kernels only read.

    penalties   float32 [R, 4]: presence, frequency, repetition, 1 if the row has a mask
    counts      int32 [R, V], see IN_PROMPT
    allowed     int32 [R, ceil(V / 32)] bit masks, id v is bit v % 32 of word v // 32
    num_edits   int32 [R]; edit_ids int32 [R, E], edit_values float32 [R, E], edit_until int32 [R, E]
    num_outputs int32 [R]: output tokens so far
    """

    def __init__(self, num_rows: int, vocab: int, max_edits: int, device: torch.device | str) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.penalties = zeros(num_rows, 4, dtype=torch.float32)
        self.penalties[:, 2] = 1
        self.counts = zeros(num_rows, vocab)
        self.allowed = zeros(num_rows, -(-vocab // 32))
        self.num_edits, self.num_outputs = zeros(num_rows), zeros(num_rows)
        self.edit_ids, self.edit_until = zeros(num_rows, max_edits), zeros(num_rows, max_edits)
        self.edit_values = zeros(num_rows, max_edits, dtype=torch.float32)


@torch.no_grad()
def apply_rules(logits: torch.Tensor, rows: torch.Tensor, rules: LogitRules) -> torch.Tensor:
    """Edits, penalties and masks of `rows` int32 [B] (-1: padding) on `logits` float32 [B, V] contiguous, in place."""
    batch, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits that rules change must be contiguous float32")
    edit_kernel[(batch,)](
        logits,
        rows,
        rules.num_outputs,
        rules.num_edits,
        rules.edit_ids,
        rules.edit_values,
        rules.edit_until,
        V=vocab,
        E=rules.edit_ids.shape[1],
        BLOCK=128,
        num_warps=1,
    )
    penalty_kernel[(batch, triton.cdiv(vocab, BLOCK))](
        logits,
        rows,
        rules.penalties,
        rules.counts,
        rules.allowed,
        V=vocab,
        WORDS=rules.allowed.shape[1],
        IN_PROMPT=IN_PROMPT,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return logits

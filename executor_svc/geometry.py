"""How many blocks, rows and tokens: the sizing rules, in one place and without a device.

A backend says what a block costs, what memory there is and what it likes by default; the operator's numbers win where
given; what cannot work is a StartupError naming the numbers and the way out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from executor_svc.config import SizeSettings
from executor_svc.errors import StartupError
from protos.stepwire.wire.v1 import step_pb2

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Defaults:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Memory:
    """For KV blocks, in bytes."""

    available: int
    # What to take when nobody said; None: modest_share().
    budget: int | None = None
    # The name of the place, for messages.
    where: str = "memory"

    def modest_share(self, sequence_bytes: int) -> int:
        """On a machine that does other things too: 512 MiB, or two sequences of full length where that is more; at
        most 4 GiB and 40 % of what is free."""
        return min(max(512 * MIB, 2 * sequence_bytes), 4 * GIB, self.available * 2 // 5)


def size_pool(
    sizes: SizeSettings,
    defaults: Defaults,
    *,
    block_bytes: Callable[[int], int],
    memory: Memory,
    max_position: int,
    vocab_size: int,
    notice: Callable[[str], None],
) -> step_pb2.Geometry:
    """block_bytes(block_size): what one block costs over all layers; max_position: tokens the model was made for."""
    block_size = sizes.block_size or defaults.block_size
    max_model_len = sizes.max_model_len or max_position
    if max_model_len > max_position:
        raise StartupError(
            f"--max-model-len {max_model_len} is beyond what the model was made for: choose at most {max_position}"
        )
    per_block = block_bytes(block_size)
    if sizes.num_blocks is not None:
        num_blocks = sizes.num_blocks
        _check_available(num_blocks * per_block, f"--num-blocks {num_blocks}", memory)
        if (holds := num_blocks * block_size) < max_model_len:
            notice(
                f"--num-blocks {num_blocks} holds {holds} tokens, less than one sequence of {max_model_len}: "
                "longer requests are refused"
            )
    else:
        num_blocks, max_model_len = _measured(sizes, block_size, per_block, max_model_len, memory, notice)
    return step_pb2.Geometry(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=sizes.max_num_seqs or defaults.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens or defaults.max_num_batched_tokens,
        vocab_size=vocab_size,
    )


def _measured(
    sizes: SizeSettings,
    block_size: int,
    per_block: int,
    max_model_len: int,
    memory: Memory,
    notice: Callable[[str], None],
) -> tuple[int, int]:
    """(num_blocks, max_model_len) from bytes."""
    needed_blocks = -(-max_model_len // block_size)
    if sizes.kv_memory is not None:
        budget = sizes.kv_memory
        _check_available(budget, f"--kv-memory {show_bytes(budget)}", memory)
    else:
        budget = memory.modest_share(needed_blocks * per_block) if memory.budget is None else memory.budget
    num_blocks = budget // per_block
    if num_blocks >= needed_blocks:
        return num_blocks, max_model_len
    if num_blocks < 1:
        raise StartupError(
            f"{show_bytes(budget)} of {memory.where} cannot hold one KV block of {block_size} tokens "
            f"({show_bytes(per_block)}): free some memory or raise --kv-memory"
        )
    fits = num_blocks * block_size
    if sizes.kv_memory is None and sizes.max_model_len is None:
        notice(
            f"max_model_len lowered from {max_model_len} to {fits} tokens: {show_bytes(budget)} of {memory.where} "
            "hold no more (raise --kv-memory for longer sequences)"
        )
        return num_blocks, fits
    raise StartupError(
        f"one sequence of {max_model_len} tokens needs {show_bytes(needed_blocks * per_block)} of KV memory, but "
        f"{show_bytes(budget)} hold {fits} tokens: raise --kv-memory or lower --max-model-len to {fits}"
    )


def _check_available(wanted: int, option: str, memory: Memory) -> None:
    if wanted > memory.available:
        raise StartupError(
            f"{option} needs {show_bytes(wanted)}, but only {show_bytes(memory.available)} of {memory.where} are free"
        )


def show_bytes(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"

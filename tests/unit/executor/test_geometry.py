"""The sizing rules, number by number."""

import numpy as np
import pytest

from executor_svc.config import SizeSettings
from executor_svc.errors import StartupError
from executor_svc.geometry import GIB, MIB, Defaults, Memory, show_bytes, size_pool
from executor_svc.memory import available_memory

DEFAULTS = Defaults(block_size=16, max_num_seqs=128, max_num_batched_tokens=512)
TOKEN = 1000  # bytes per token


def size(memory: Memory, max_position: int = 8192, **settings: int):
    notices: list[str] = []
    result = size_pool(
        SizeSettings(**settings),
        DEFAULTS,
        block_bytes=lambda block_size: block_size * TOKEN,
        memory=memory,
        max_position=max_position,
        vocab_size=100,
        notice=notices.append,
    )
    return result, notices


def test_defaults_and_the_operators_numbers():
    geometry, _ = size(Memory(8 * GIB))
    assert (geometry.block_size, geometry.max_num_seqs, geometry.max_num_batched_tokens) == (16, 128, 512)
    assert geometry.max_model_len == 8192
    assert geometry.num_blocks == 512 * MIB // (16 * TOKEN)
    geometry, _ = size(Memory(8 * GIB), block_size=32, max_num_seqs=3, max_num_batched_tokens=7, max_model_len=100)
    assert (geometry.block_size, geometry.max_num_seqs, geometry.max_num_batched_tokens) == (32, 3, 7)
    assert geometry.max_model_len == 100


def test_num_blocks_wins_and_may_hold_less_than_one_sequence():
    geometry, [notice] = size(Memory(8 * GIB), num_blocks=511, kv_memory=GIB)
    assert (geometry.num_blocks, geometry.max_model_len) == (511, 8192)
    assert "holds 8176 tokens, less than one sequence of 8192" in notice
    assert size(Memory(8 * GIB), num_blocks=512)[1] == []


@pytest.mark.parametrize(("kv_memory", "fits"), [(8192 * TOKEN - 1, False), (8192 * TOKEN, True)])
def test_given_memory_must_hold_one_sequence(kv_memory, fits):
    if fits:
        assert size(Memory(8 * GIB), kv_memory=kv_memory)[0].num_blocks == 512
        return
    with pytest.raises(StartupError, match="raise --kv-memory or lower --max-model-len to 8176"):
        size(Memory(8 * GIB), kv_memory=kv_memory)


def test_measured_memory_lowers_the_length_unless_it_was_asked_for():
    geometry, [notice] = size(Memory(10_000_000), max_position=8192)
    assert geometry.max_model_len == geometry.num_blocks * 16 == 250 * 16
    assert "lowered from 8192 to 4000" in notice
    with pytest.raises(StartupError, match="one sequence of 5000 tokens"):
        size(Memory(10_000_000), max_model_len=5000)
    assert size(Memory(10_000_000), max_model_len=4000)[1] == []


def test_more_than_there_is():
    with pytest.raises(StartupError, match=r"--kv-memory 2.0 GiB needs 2.0 GiB, but only 1.0 GiB"):
        size(Memory(GIB), kv_memory=2 * GIB)
    with pytest.raises(StartupError, match=r"--num-blocks 1000000 needs 14\.9 GiB"):
        size(Memory(GIB), num_blocks=1_000_000)


def test_not_even_one_block():
    with pytest.raises(StartupError, match="cannot hold one KV block"):
        size(Memory(16 * TOKEN))


def test_longer_than_the_model():
    with pytest.raises(StartupError, match=r"--max-model-len 8193 is beyond what .* choose at most 8192$"):
        size(Memory(GIB), max_model_len=8193)


def test_the_modest_share():
    assert Memory(100 * GIB).modest_share(MIB) == 512 * MIB
    assert Memory(100 * GIB).modest_share(GIB) == 2 * GIB
    assert Memory(100 * GIB).modest_share(17 * GIB) == 4 * GIB
    assert Memory(GIB).modest_share(MIB) == GIB * 2 // 5
    assert size(Memory(8 * GIB, budget=GIB))[0].num_blocks == GIB // (16 * TOKEN)


def test_sizes_for_people():
    assert [show_bytes(n) for n in (5, 2048, 3 * MIB // 2, 4 * GIB)] == ["5 bytes", "2.0 KiB", "1.5 MiB", "4.0 GiB"]


def test_a_container_limit_counts(tmp_path):
    unlimited = available_memory(tmp_path)
    assert unlimited > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_memory(tmp_path) > 1 * MIB
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory(tmp_path) == 4000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    assert available_memory(tmp_path) == 4300
    (tmp_path / "memory.current").write_text("9000\n")
    assert available_memory(tmp_path) == 0


def test_the_pool_copies_blocks_in_every_layer():
    torch = pytest.importorskip("torch")
    from executor_svc.kv_cache import ALIGNMENT, KVPool

    class Shape:
        num_layers, num_kv_heads, head_dim = 3, 2, 5

    for dtype in ("float32", "bfloat16"):
        pool = KVPool(Shape(), num_blocks=7, block_size=4, dtype=dtype)
        tensors = [tensor for layer in pool.layers for tensor in layer]
        assert len(tensors) == 6
        assert KVPool.bytes_per_block(Shape(), 4, dtype) * 7 == sum(t.numel() * t.element_size() for t in tensors)
        for number, tensor in enumerate(tensors):
            assert tuple(tensor.shape) == (7, 2, 4, 5)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            assert not tensor.any()
            tensor.copy_(torch.arange(7).view(7, 1, 1, 1).expand(7, 2, 4, 5) + 10 * number)
        pool.copy_blocks(np.array([[1, 6], [2, 0]], np.int32))
        for number, tensor in enumerate(tensors):
            assert (tensor[:, 1, 3, 4] - 10 * number).tolist() == [2, 1, 2, 3, 4, 5, 1]

"""The streaming writer against the safetensors package; the check against damaged files."""

import hashlib
import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from scheduler_svc.errors import StartupError
from scheduler_svc.models.safetensors_io import TensorSpec, check_safetensors, write_safetensors

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(5, dtype=np.float16),
    "grüße": np.ones((1, 1), np.float32),
}


def write(path, names=ARRAYS):
    kinds = {"float32": "F32", "float16": "F16"}
    specs = [
        TensorSpec(name, kinds[str(a.dtype)], a.shape, lambda a=a: np.array_split(a, 2)) for name, a in ARRAYS.items()
    ]
    seen = []
    digest = write_safetensors(path, [spec for spec in specs if spec.name in names], seen.append)
    return digest, sum(seen)


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    digest, seen = write(tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert set(loaded) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    assert seen == sum(array.nbytes for array in ARRAYS.values())
    assert digest == hashlib.sha256((tmp_path / "out.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_bfloat16_goes_through_as_bytes(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).bfloat16()
    raw = tensor.view(torch.int16).numpy().view(np.uint8)
    write_safetensors(tmp_path / "b.safetensors", [TensorSpec("b", "BF16", (3, 5), lambda: [raw])], lambda _: None)
    assert torch.equal(load_torch(tmp_path / "b.safetensors")["b"], tensor)


def test_a_tensor_of_the_wrong_size_is_our_bug(tmp_path):
    spec = TensorSpec("a", "F32", (3,), lambda: [np.zeros(2, np.float32)])
    with pytest.raises(AssertionError, match="'a', 8, 12"):
        write_safetensors(tmp_path / "a.safetensors", [spec], lambda _: None)


def test_good_files_pass(tmp_path):
    write(tmp_path / "ours.safetensors")
    check_safetensors(tmp_path / "ours.safetensors")
    save_file(ARRAYS, tmp_path / "theirs.safetensors")
    check_safetensors(tmp_path / "theirs.safetensors")


def test_every_truncation_is_found(tmp_path):
    write(tmp_path / "out.safetensors")
    whole = (tmp_path / "out.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        with pytest.raises(StartupError, match="fetch it again"):
            check_safetensors(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(StartupError, match="its header says"):
        check_safetensors(cut)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": [0]}}', b"\xff\xff"])
def test_damaged_headers(tmp_path, header):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StartupError, match="fetch it again"):
        check_safetensors(path)


def test_a_git_lfs_pointer_is_no_weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(StartupError, match="no safetensors file"):
        check_safetensors(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(StartupError, match="No such file"):
        check_safetensors(tmp_path / "none.safetensors")


def test_headers_are_padded_to_eight_bytes(tmp_path):
    for names in (["half"], ["grüße"], list(ARRAYS)):
        write(tmp_path / "out.safetensors", names)
        data = (tmp_path / "out.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        assert set(json.loads(data[8 : 8 + length])) == {"__metadata__", *names}

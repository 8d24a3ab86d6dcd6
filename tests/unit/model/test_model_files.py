"""Model directories that are incomplete, damaged, hostile or unusual: one clear StartupError, or the right model."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from executor_svc.errors import StartupError
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.load import load_model
from tests.unit.model.support import Driver, Row, check_against, make_model, prompt


@pytest.fixture
def tiny(tmp_path):
    """(directory, transformers' instance) of a fresh tiny model."""
    return tmp_path, make_model(tmp_path, "llama", num_hidden_layers=2)


def load(directory):
    return load_model(directory, ModelConfig.from_directory(directory), dtype="float32")


def edit_config(directory, **changes) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({k: v for k, v in (json.loads(file.read_text()) | changes).items() if v != "absent"}))


def edit_weights(directory, change) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def test_no_config(tmp_path):
    with pytest.raises(StartupError, match=r"no config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\ud800"])
def test_unreadable_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(StartupError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "'BertModel' is not supported"),
        ({"architectures": "absent"}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"hidden_act": "relu6"}, "'relu6' is not supported"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn' are incomplete"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta -1"),
        ({"vocab_size": 98}, "97 embeddings for a vocab_size of 98"),
        ({"intermediate_size": 64}, "config.json implies"),
        ({"num_hidden_layers": 3}, "lacks tensor 'model.layers.2"),
        ({"num_hidden_layers": 1}, "does not belong"),
    ],
)
def test_configs_that_cannot_be_right(tiny, changes, message):
    edit_config(tiny[0], **changes)
    with pytest.raises(StartupError, match=message):
        load(tiny[0])


def test_no_weights(tiny):
    (tiny[0] / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="neither"):
        load(tiny[0])


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_weights(tiny, keep):
    file = tiny[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        load(tiny[0])


def _write(file, header: dict, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": ["4"], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 50]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        7,
    ],
)
def test_hostile_headers(tmp_path, entry):
    _write(tmp_path / "model.safetensors", {"x": entry}, bytes(16))
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(("first", "second"), [([0, 16], [8, 24]), ([0, 8], [16, 24]), ([8, 16], [16, 24])])
def test_tensors_that_overlap_or_leave_gaps(tmp_path, first, second):
    entries = {
        name: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
        for name, (begin, end) in {"x": first, "y": second}.items()
    }
    _write(tmp_path / "model.safetensors", entries, bytes(24))
    with pytest.raises(StartupError, match=r"model\.safetensors has a damaged header"):
        Checkpoint(tmp_path)


def test_a_header_of_odd_length_moves_no_number(tmp_path):
    values = np.arange(5, dtype=np.float32)
    entries = {"x": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}}
    for spaces in range(4):
        text = json.dumps(entries).encode() + b" " * spaces
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())
        found = Checkpoint(tmp_path).array("x", (5,))
        assert found.flags.aligned
        assert np.array_equal(found, values)


def test_a_header_longer_than_any_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(StartupError, match="truncated"):
        Checkpoint(tmp_path)


def test_a_tensor_of_another_shape(tiny):
    edit_weights(tiny[0], lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(StartupError, match=r"'model\.norm\.weight' has shape \[31\]"):
        load(tiny[0])


def test_quantised_tensors_are_refused(tiny):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(tiny[0], lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(StartupError, match="stored as I8"):
        load(tiny[0])


def test_a_missing_head(tiny):
    edit_weights(tiny[0], lambda t: t.pop("lm_head.weight"))
    with pytest.raises(StartupError, match=r"no lm_head\.weight"):
        load(tiny[0])


def _shard(directory) -> dict[str, str]:
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    files = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name].clone() for name in part}, directory / file)
    (directory / "model.safetensors").unlink()
    index = {name: file for file, part in files.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return index


def test_sharded_weights(tiny):
    _shard(tiny[0])
    decoder = load(tiny[0])
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(20)), chunk=1000, num_outputs=5))


def test_a_missing_shard(tiny):
    _shard(tiny[0])
    (tiny[0] / "two.safetensors").unlink()
    with pytest.raises(StartupError, match=r"two\.safetensors, which is missing"):
        load(tiny[0])


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", 3])
def test_an_index_that_points_elsewhere(tiny, name):
    index = _shard(tiny[0])
    index[next(iter(index))] = name
    (tiny[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(StartupError, match=r"index\.json"):
        load(tiny[0])


def test_padded_vocabulary(tiny):
    def pad(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.cat([tensors[name], torch.full((31, 32), 1e3)])

    edit_weights(tiny[0], pad)
    decoder = load(tiny[0])
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(20)), chunk=1000, num_outputs=5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_stored_in_half_precision(tiny, dtype):
    edit_weights(tiny[0], lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    with torch.no_grad():
        for parameter in tiny[1].parameters():
            parameter.copy_(parameter.to(dtype))
    decoder = load(tiny[0])
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(20)), chunk=1000, num_outputs=5))


def test_old_spellings_of_rope_and_windows(tiny):
    edit_config(tiny[0], rope_parameters="absent", rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 1.0})
    decoder = load(tiny[0])
    check_against(tiny[1], Driver(decoder, decoder.config).run(Row(prompt(20)), chunk=1000, num_outputs=5))


def test_progress_is_reported(tiny):
    seen = []
    load_model(tiny[0], ModelConfig.from_directory(tiny[0]), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_code_in_a_model_folder_is_never_run(tiny):
    directory, _ = tiny
    ran = directory / "ran"
    trap = f"open({str(ran)!r}, 'w').close()\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py"):
        (directory / name).write_text(trap)
    names = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit_config(directory, auto_map=names)
    load(directory)
    assert not ran.exists()

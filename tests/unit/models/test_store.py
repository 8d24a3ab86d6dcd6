"""resolve_model for every kind of spec; the cache and its listing. The network is never touched."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.models import hub, store
from scheduler_svc.models.manifest import NAME as MANIFEST
from scheduler_svc.models.manifest import damaged_files
from scheduler_svc.models.store import fingerprint, list_models, model_path, remove_model, resolve_model
from tests.unit.models.gguf_builder import tiny_model, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path):
    return write_model(tmp_path / "tiny.gguf", tiny_model("llama"))


def test_a_gguf_file_is_converted_once(gguf_file, cache):
    assert model_path(str(gguf_file)) is None
    directory = resolve_model(str(gguf_file))
    assert directory.parent == cache / "models"
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        MANIFEST,
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(gguf_file)) == directory == model_path(str(gguf_file))
    assert (directory / "model.safetensors").stat().st_mtime_ns == written
    assert store.check_directory(directory) == directory


def test_another_content_is_another_directory(gguf_file):
    first = resolve_model(str(gguf_file))
    write_model(gguf_file, tiny_model("llama", num_hidden_layers=3))
    assert resolve_model(str(gguf_file)) != first


def test_a_directory_with_one_gguf_file(gguf_file):
    assert resolve_model(str(gguf_file.parent)) == resolve_model(str(gguf_file))
    write_model(gguf_file.parent / "other.gguf", tiny_model("llama"))
    with pytest.raises(StartupError, match=r"holds 2 GGUF files: give one of them"):
        resolve_model(str(gguf_file.parent))


def test_damage_is_found_and_repaired(gguf_file):
    directory = resolve_model(str(gguf_file))
    assert damaged_files(directory) == []
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert damaged_files(directory) == ["model.safetensors"]
    weights.write_bytes(content[:-1])
    assert [model.whole for model in list_models()] == [False]
    assert resolve_model(str(gguf_file)) == directory
    assert weights.read_bytes() == content


def test_an_older_conversion_is_made_anew(gguf_file):
    directory = resolve_model(str(gguf_file))
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["origin"]["conversion"] -= 1
    (directory / MANIFEST).write_text(json.dumps(manifest))
    resolve_model(str(gguf_file))
    assert (
        json.loads((directory / MANIFEST).read_text())["origin"]["conversion"] == manifest["origin"]["conversion"] + 1
    )


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path, gguf_file, cache):
    content = gguf_file.read_bytes()
    for length in (0, 3, 100, len(content) // 2, len(content) - 64):
        gguf_file.write_bytes(content[:length])
        with pytest.raises(StartupError):
            resolve_model(str(gguf_file))
    left = [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")]
    assert left == []


def test_listing_and_forgetting(gguf_file):
    assert list_models() == []
    directory = resolve_model(str(gguf_file))
    (model,) = list_models()
    assert (model.name, model.path, model.whole) == (directory.name, directory, True)
    assert model.origin["gguf"] == str(gguf_file)
    assert remove_model("nothing") is False
    assert remove_model(directory.name) is True
    assert list_models() == []


def test_a_link_to_a_directory_is_that_directory(gguf_file, tmp_path):
    directory = resolve_model(str(gguf_file))
    (tmp_path / "current").symlink_to(directory)
    assert resolve_model(str(tmp_path / "current")) == directory


def test_a_directory_is_used_as_it_is(gguf_file, tmp_path, monkeypatch):
    directory = resolve_model(str(gguf_file)).rename(tmp_path / "mine")
    (directory / MANIFEST).unlink()
    assert resolve_model(str(directory)) == directory
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine") == directory
    assert model_path("mine") == directory


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "has no config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda d: (d / "config.json").write_text("{}"), "names no model_type"),
        (lambda d: (d / "config.json").write_text("[]"), "names no model_type"),
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "model.safetensors").unlink(), r"no \*.safetensors"),
        (lambda d: os.truncate(d / "model.safetensors", 5000), "fetch it again"),
        (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "index.json is damaged"),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
            "x.safetensors: No such file",
        ),
    ],
)
def test_what_a_directory_lacks_is_named(gguf_file, tmp_path, break_it, message):
    directory = resolve_model(str(gguf_file)).rename(tmp_path / "mine")
    break_it(directory)
    with pytest.raises(StartupError, match=message) as caught:
        resolve_model(str(directory))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["/no/such/dir", "./none", "../none", "no/such.gguf", "a b", "a/b/c", "ä/b", "~/none"])
def test_what_is_nothing_at_all(spec):
    with pytest.raises(StartupError, match="no such model"):
        resolve_model(spec)


def test_another_kind_of_file(tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(StartupError, match="is not a model"):
        resolve_model(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("gpt2", True), ("owner/name", True), ("owner/na.me-1@refs/pr/2", True), ("owner/../x", False), ("o/n@", False)],
)
def test_hub_ids(spec, expected):
    assert hub.is_hub_id(spec) is expected


def test_hub_asks_for_weights_and_json_only(monkeypatch, gguf_file):
    directory = resolve_model(str(gguf_file))
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("owner/name@v1") == directory
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    assert not any("bin" in pattern or "py" in pattern or pattern == "*" for pattern in asked["allow_patterns"])


def test_hub_offline_is_one_line(tmp_path):
    code = "from scheduler_svc.models.store import resolve_model; resolve_model('owner/name')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert "StartupError: cannot get model 'owner/name': the hub cannot be reached" in last


def test_fingerprint_is_the_digest_both_sides_compute(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    content = b"config.json\0{}tokenizer.json\0"
    assert fingerprint(tmp_path) == hashlib.sha256(content).hexdigest()[:32]
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    assert fingerprint(tmp_path) == hashlib.sha256(content + b"[]").hexdigest()[:32]


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    from scheduler_svc.models.config import cache_root

    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("STEPWIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(cache_root()) == "/xdg/stepwire"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(cache_root()) == "/somewhere/.cache/stepwire"


def test_nothing_here_imports_torch():
    names = ["store", "convert", "default_model", "hub", "progress", "safetensors_io"]
    code = f"import sys\nfor name in {names}: __import__('scheduler_svc.models.' + name)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

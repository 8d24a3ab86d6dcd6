"""The one door to models: `resolve_model(spec)` gives a directory that both services can read.

    ""  or the default's name      the default model, fetched and converted once
    a directory                    as it is, if it is whole; with one GGUF file and no config.json: that file
    a .gguf file                   converted once into the cache
    owner/name[@revision]          through huggingface_hub

Layout of the cache: models/<name>/ for the default, models/<file stem>-<key>/ for converted files.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.errors import StartupError
from scheduler_svc.models.atomic import build_once
from scheduler_svc.models.config import cache_root
from scheduler_svc.models.default_model import NAME, ORIGIN, SAMPLING, default_gguf
from scheduler_svc.models.manifest import is_whole, read_manifest
from scheduler_svc.models.progress import Progress, silent
from scheduler_svc.models.safetensors_io import check_safetensors


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    num_bytes: int
    origin: dict[str, Any]
    whole: bool


def resolve_model(spec: str = "", progress: Progress = silent) -> Path:
    """A directory with config.json, tokenizer.json and safetensors; raises StartupError otherwise."""
    if is_default(spec):
        return _default(progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _from_directory(path, progress)
    if path.is_file():
        if path.suffix == ".gguf":
            return _from_gguf(path, progress)
        raise StartupError(f"{path} is not a model: give a directory, a .gguf file or a hub id")
    return _from_hub(spec, path, progress)


def model_path(spec: str = "") -> Path | None:
    """Where the model is if nothing needs to be fetched or converted for it, else None."""
    path = default_directory() if is_default(spec) else Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        path = converted_directory(path)
    cached = path.parent == models_directory()
    return path.absolute() if path.is_dir() and (not cached or is_whole(path)) else None


def list_models() -> list[CachedModel]:
    found = []
    if models_directory().is_dir():
        for path in sorted(models_directory().iterdir()):
            manifest = read_manifest(path) if path.is_dir() and not path.name.startswith(".") else None
            if manifest is None:
                continue
            size = sum(entry.get("bytes", 0) for entry in manifest["files"].values())
            found.append(CachedModel(path.name, path, size, manifest.get("origin", {}), is_whole(path)))
    return found


def remove_model(name: str) -> bool:
    """Forgets a model of the cache; False: there is none of that name."""
    for model in list_models():
        if model.name == name:
            shutil.rmtree(model.path)
            return True
    return False


def fingerprint(model_dir: Path) -> str:
    """Tells whether two processes mean the same model: a digest over its config and tokenizer."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        path = model_dir / name
        digest.update(name.encode() + b"\0")
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:32]


def is_default(spec: str) -> bool:
    return spec == "" or (spec.lower() in (NAME.lower(), "default") and not Path(spec).exists())


def models_directory() -> Path:
    return cache_root() / "models"


def default_directory() -> Path:
    return models_directory() / NAME.lower()


def converted_directory(source: Path) -> Path:
    """Keyed by name, size, time and both ends of the file: hashing gigabytes at each start would cost seconds."""
    status = source.stat()
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns}".encode())
    with source.open("rb") as file:
        digest.update(file.read(4 << 20))
        file.seek(max(0, status.st_size - (1 << 20)))
        digest.update(file.read(1 << 20))
    return models_directory() / f"{source.stem}-{digest.hexdigest()[:12]}"


def check_directory(path: Path) -> Path:
    """Raises StartupError unless the directory holds all that serving needs; reads headers only."""
    _read_config(path)
    if not (path / "tokenizer.json").is_file():
        raise StartupError(f"{path} has no tokenizer.json (transformers' AutoTokenizer can save one)")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            raise StartupError(f"{index} is damaged: fetch it again") from None
    else:
        names = {shard.name for shard in path.glob("*.safetensors")}
    if not names:
        raise StartupError(f"{path} has no *.safetensors: only safetensors and GGUF weights are read")
    for name in sorted(names):
        check_safetensors(path / name)
    return path


def _read_config(path: Path) -> None:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} has no config.json: it is not a model directory") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise StartupError(f"{path / 'config.json'} names no model_type: it is not a model's config")


def _from_directory(path: Path, progress: Progress) -> Path:
    files = sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").exists():
        if len(files) > 1:
            raise StartupError(f"{path} holds {len(files)} GGUF files: give one of them, such as {files[0]}")
        return _from_gguf(files[0], progress)
    # Through a link: a model is called what its own directory is called.
    return check_directory(path.resolve())


def _from_gguf(source: Path, progress: Progress) -> Path:
    def build(directory: Path) -> None:
        from scheduler_svc.models.convert import convert_gguf

        convert_gguf(source, directory, progress, {"gguf": str(source.absolute())})

    try:
        target = converted_directory(source)
    except OSError as error:
        raise StartupError(f"cannot read {source}: {error.strerror}") from None
    return _build(target, build, progress)


def _from_hub(spec: str, path: Path, progress: Progress) -> Path:
    from scheduler_svc.models.hub import fetch_from_hub, is_hub_id

    if spec.startswith(("/", "./", "../", "~")) or path.suffix == ".gguf" or not is_hub_id(spec):
        raise StartupError(f"no such model: {spec!r} is no directory, no .gguf file and no hub id (owner/name)")
    return check_directory(fetch_from_hub(spec, progress))


def _default(progress: Progress) -> Path:
    def build(directory: Path) -> None:
        from scheduler_svc.models.convert import convert_gguf

        with default_gguf(directory.parent, progress) as source:
            convert_gguf(source, directory, progress, ORIGIN, sampling=SAMPLING)

    return _build(default_directory(), build, progress)


def _build(target: Path, build: Callable[[Path], None], progress: Progress) -> Path:
    return build_once(target, is_whole, build, progress)

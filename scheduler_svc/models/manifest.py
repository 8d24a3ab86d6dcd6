"""stepwire.json in a directory of the cache: where it came from, and size and sha256 of each file."""

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "stepwire.json"
# Raise it when the same GGUF file would be converted differently: older directories are then made anew.
CONVERSION = 2


def write_manifest(directory: Path, origin: dict[str, Any], known: dict[str, str]) -> None:
    """`known`: digests computed while the files were written."""
    files = {}
    for path in sorted(directory.iterdir()):
        digest = known.get(path.name) or file_digest(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
    text = json.dumps({"origin": origin, "files": files}, indent=2) + "\n"
    (directory / NAME).write_text(text, encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("files"), dict) else None


def is_whole(directory: Path) -> bool:
    """Cheap: every file of the manifest is there with its size, made by this version of the conversion."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.get("origin", {}).get("conversion") != CONVERSION:
        return False
    return all(_size(directory / name) == entry["bytes"] for name, entry in manifest["files"].items())


def damaged_files(directory: Path) -> list[str]:
    """Thorough: names of files whose content is not what was written."""
    manifest = read_manifest(directory)
    if manifest is None:
        return [NAME]
    return [
        name
        for name, entry in manifest["files"].items()
        if _size(directory / name) != entry["bytes"] or file_digest(directory / name) != entry["sha256"]
    ]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1

"""Which model this executor runs, as both ends of the wire name it."""

import hashlib
import json
from pathlib import Path

from executor_svc.errors import StartupError


def fingerprint(model_dir: Path | None) -> str:
    """A digest over the config and the tokenizer, the same that frontends compute; a missing file counts as empty."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        path = model_dir / name if model_dir is not None else None
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path is not None and path.is_file() else b""))
    return digest.hexdigest()[:32]


def read_config(model_dir: Path) -> dict:
    """config.json as it is; the model package reads the same file with far more care."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise StartupError(f"--model {model_dir}: there is no config.json in it") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config

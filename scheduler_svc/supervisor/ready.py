"""Ready files: a small JSON object that appears whole or not at all, written by a service once it answers."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write(path: Path, value: dict[str, Any]) -> None:
    """A reader sees the old object or the new one, never half of one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, Any] | None:
    """None while there is nothing to read."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None

"""What the model store reads from the environment, and nothing else does."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$STEPWIRE_CACHE, else the XDG cache directory + "stepwire"."""
    chosen = os.environ.get("STEPWIRE_CACHE", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    base = Path(xdg) if xdg.startswith("/") else Path.home() / ".cache"
    return base / "stepwire"


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment for a child, with `changes`."""
    return {**os.environ, **changes}

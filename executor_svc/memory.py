"""How much host memory there is to take: what the system has, and what a container may use."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes."""
    available = psutil.virtual_memory().available
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # Cached file pages count as used but are given back under pressure.
    reclaimable = _read_field(cgroup / "memory.stat", "inactive_file")
    return max(0, min(available, limit - used + reclaimable))


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _read_field(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)

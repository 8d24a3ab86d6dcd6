"""From the model's name to a directory on this disk, before any child starts, with progress on the console."""

from pathlib import Path

from scheduler_svc.supervisor.console import Console


def resolve(name: str, console: Console) -> Path:
    from scheduler_svc.models import resolve_model

    return resolve_model(name, console.status)

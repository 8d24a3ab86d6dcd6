"""The default model's directory: its configuration and tokenizer are what the simulated backend serves."""

from pathlib import Path

import pytest

from scheduler_svc.models.store import resolve_model


@pytest.fixture(scope="session")
def default_model() -> Path:
    return resolve_model("")

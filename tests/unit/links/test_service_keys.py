"""CURVE keys for containers: each service gets its own secret and nobody else's; a second start changes nothing."""

import pytest
import zmq.auth

from scheduler_svc.errors import StartupError
from scheduler_svc.links.curve import load_public_keys, make_for_services


def tree(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_each_service_has_what_it_needs_and_no_more(tmp_path):
    made = make_for_services(tmp_path / "keys")
    found = tree(tmp_path / "keys")
    assert sorted(found) == sorted(str(path.relative_to(tmp_path / "keys")) for path in made)
    assert sorted(found) == [
        "executor/executor.key_secret",
        "executor/scheduler.key",
        "frontend/frontend.key_secret",
        "frontend/scheduler.key",
        "scheduler/clients/executor.key",
        "scheduler/clients/frontend.key",
        "scheduler/scheduler.key",
        "scheduler/scheduler.key_secret",
    ]
    for path in made:
        assert path.stat().st_mode & 0o077 == 0
    secrets = [zmq.auth.load_certificate(path)[1] for path in made if path.suffix == ".key_secret"]
    for name, content in found.items():
        assert not name.endswith(".key") or not any(secret in content for secret in secrets)
    allowed = load_public_keys(tmp_path / "keys/scheduler/clients")
    for service in ("frontend", "executor"):
        assert zmq.auth.load_certificate(tmp_path / f"keys/{service}/{service}.key_secret")[0] in allowed


def test_keys_that_are_there_stay(tmp_path):
    make_for_services(tmp_path)
    before = tree(tmp_path)
    assert make_for_services(tmp_path) == []
    assert tree(tmp_path) == before


def test_half_a_set_is_not_completed_silently(tmp_path):
    """A new key for one would not be known to the others."""
    make_for_services(tmp_path)
    (tmp_path / "frontend/frontend.key_secret").unlink()
    with pytest.raises(StartupError, match=r"exists but .*frontend.key_secret does not"):
        make_for_services(tmp_path)

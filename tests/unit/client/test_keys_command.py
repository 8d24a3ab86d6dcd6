"""`stepwire keys`: what an operator types, and what is on disk afterwards."""

import stat

import pytest
import zmq.auth
from typer.testing import CliRunner

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend import api_keys
from scheduler_svc.keys_command import keys


def run(*arguments: object):
    done = CliRunner().invoke(keys, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_make_list_revoke(tmp_path):
    file = tmp_path / "keys"
    key = run("make", file, "--tenant", "acme").stdout.strip()
    other = run("make", file, "--tenant", "globex").stdout.strip()
    assert mode(file) == 0o600
    ring = api_keys.Keyring(api_keys.read(file))
    assert (ring.tenant_of(key), ring.tenant_of(other)) == ("acme", "globex")
    listed = run("list", file).stdout
    assert [line.split()[:2] for line in listed.splitlines()] == [[key[3:11], "acme"], [other[3:11], "globex"]]
    assert key not in listed + file.read_text()
    run("revoke", file, key[3:11])
    assert [line.split()[1] for line in run("list", file).stdout.splitlines()] == ["globex"]
    with pytest.raises(StartupError, match="no key with the id"):
        run("revoke", file, key[3:11])


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    file = tmp_path / "notes"
    file.write_text("remember the milk\n")
    with pytest.raises(StartupError, match="line 1"):
        run("make", file, "--tenant", "acme")
    assert file.read_text() == "remember the milk\n"


def test_the_inode_stays_so_that_a_mounted_file_sees_the_change(tmp_path):
    file = tmp_path / "keys"
    key = run("make", file, "--tenant", "acme").stdout.strip()
    before = file.stat().st_ino
    run("make", file, "--tenant", "acme")
    run("revoke", file, key[3:11])
    assert file.stat().st_ino == before


def test_curve_keys_for_each_service(tmp_path):
    folder = tmp_path / "curve"
    run("curve", folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("clients", "executor.key", "executor.key_secret", "frontend.key", "frontend.key_secret"),
        *("scheduler.key", "scheduler.key_secret"),
    ]
    assert sorted(path.name for path in (folder / "clients").iterdir()) == ["executor.key", "frontend.key"]
    assert {mode(path) for path in folder.rglob("*.key*")} == {0o600}
    assert mode(folder) == 0o700
    public, secret = zmq.auth.load_certificate(folder / "frontend.key_secret")
    assert secret
    assert zmq.auth.load_certificate(folder / "clients" / "frontend.key") == (public, None)
    run("curve", folder, "frontend-b")
    assert (folder / "clients" / "frontend-b.key").exists()
    with pytest.raises(StartupError, match="exists"):
        run("curve", folder, "executor-b", "frontend")
    assert not (folder / "executor-b.key").exists()
    with pytest.raises(StartupError, match="no name for a key"):
        run("curve", folder, "../x")

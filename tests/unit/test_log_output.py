"""Lines that cannot leave are dropped without waiting; a bug is one line. Both services have the same handler."""

import fcntl
import logging
import os

import pytest
import typer

import executor_svc.log_output
import scheduler_svc.log_output
from scheduler_svc import entry

PIPE_BYTES = 4096


@pytest.mark.parametrize("module", [scheduler_svc.log_output, executor_svc.log_output])
def test_a_full_pipe_holds_nobody_up_and_the_next_reader_hears_how_much_it_missed(module):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    handler = module.PatientHandler(writing)
    record = logging.makeLogRecord({"msg": "x" * 1000, "levelno": logging.INFO})
    for _ in range(10):
        handler.handle(record)
    assert handler.num_dropped > 0
    dropped = handler.num_dropped
    assert os.read(reading, 1 << 16).startswith(b"x" * 1000 + b"\n")
    handler.handle(record)
    assert (
        os.read(reading, 1 << 16)
        == f"({dropped} lines were dropped: nobody took them)\n".encode() + b"x" * 1000 + b"\n"
    )
    assert handler.num_dropped == 0
    os.close(reading)
    handler.handle(record)
    assert handler.num_dropped == 1
    os.close(writing)


@pytest.mark.parametrize("module", [scheduler_svc.log_output, executor_svc.log_output])
def test_a_full_disk_holds_nobody_up(module):
    with open("/dev/full", "wb") as full:
        handler = module.PatientHandler(full.fileno())
        handler.handle(logging.makeLogRecord({"msg": "x"}))
        assert handler.num_dropped == 1


def test_a_bug_is_one_line_without_what_users_sent_and_status_70(caplog):
    app = typer.Typer()

    @app.command()
    def broken() -> None:
        raise RuntimeError("the words of a user")

    assert entry.run(app, "stepwire test", []) == 70
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "error=RuntimeError at=test_log_output.py:" in record.getMessage()
    assert "user" not in record.getMessage()

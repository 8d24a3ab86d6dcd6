"""Lines that cannot leave are dropped without waiting; a bug is one line. Both services have the same handler."""

import fcntl
import json
import logging
import os
from pathlib import Path

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


BOTH = pytest.mark.parametrize("module", [scheduler_svc.log_output, executor_svc.log_output])


def said(module, template: str, *args: object) -> dict:
    record = logging.LogRecord("a.b", logging.WARNING, "file.py", 1, template, args, None)
    line = module.JsonLines("scheduler").format(record)
    assert "\n" not in line
    return json.loads(line)


@BOTH
def test_json_is_one_object_a_line_with_the_named_values_as_fields(module):
    fields = said(
        module, "lost request_id=%r count=%d share=%.2f boot=%016x done %s at 100%%", "r\n1", 3, 0.25, 255, "x"
    )
    assert fields.pop("time").endswith("Z")
    assert fields.pop("pid") == os.getpid()
    assert fields == {
        **{"level": "warning", "service": "scheduler", "logger": "a.b"},
        "message": "lost request_id='r\\n1' count=3 share=0.25 boot=00000000000000ff done x at 100%",
        **{"request_id": "r\n1", "count": 3, "share": 0.25, "boot": "ff"},
    }


@BOTH
def test_a_value_cannot_take_the_place_of_a_field(module):
    assert said(module, "x level=%s message=%s", "forged", "forged")["level"] == "warning"
    assert said(module, "x level=%s", "forged")["message"] == "x level=forged"


@BOTH
def test_values_of_other_kinds_are_text_and_no_arguments_are_no_fields(module):
    assert said(module, "x error=%s", ValueError("y"))["error"] == "y"
    assert set(said(module, "a=%s as it is")) == {"time", "level", "service", "logger", "pid", "message"}


@BOTH
def test_what_was_dropped_is_told_in_json_too(module):
    reading, writing = os.pipe()
    handler = module.PatientHandler(writing)
    handler.setFormatter(module.JsonLines("x"))
    handler.num_dropped = 7
    handler.handle(logging.makeLogRecord({"msg": "y", "levelno": logging.INFO, "levelname": "INFO"}))
    first, second = map(json.loads, os.read(reading, 1 << 16).splitlines())
    assert (first["level"], first["message"]) == ("warning", "(7 lines were dropped: nobody took them)")
    assert second["message"] == "y"
    os.close(reading)
    os.close(writing)


def test_both_services_write_the_same_lines():
    ours, theirs = (
        Path(module.__file__).read_text().split("class LogFormat")[1].split("def start_logging")[0]
        for module in (scheduler_svc.log_output, executor_svc.log_output)
    )
    assert ours.split("def level_number")[0].strip() == theirs.strip()

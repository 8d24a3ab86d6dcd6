import logging

import pytest

from scheduler_svc.log_output import JsonLines
from scheduler_svc.supervisor.log_lines import is_routine, level


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("2026-11-29 19:45:28,253 INFO scheduler_svc.process scheduler_ready frontend=ipc://x", logging.INFO),
        ("2026-11-29 19:45:28,253 WARNING a.b epoch_ended", logging.WARNING),
        ("ERROR plan_refused", logging.ERROR),
        ("I0000 00:00:1761.5 12 server.cc:83] started", logging.INFO),
        ("E1129 19:48:47.924168   23816 add_port.cc:83] Failed to add port", logging.ERROR),
        ("loading weights 2.0 s", None),
        ('{"time": "2026-11-29T19:45:28.253Z", "level": "error", "service": "x"}', logging.ERROR),
        ('{"time": "2026-11-29T19:45:28.253Z", "level": "loud", "service": "x"}', None),
        ("INFORMATION is power", None),
        ("Traceback (most recent call last):", None),
        ('  File "x.py", line 1, in <module>', None),
        ("", None),
    ],
)
def test_levels(line, number):
    assert level(line) == number


def test_routine_is_below_a_level_and_a_line_without_one_never_is():
    assert is_routine("INFO x")
    assert not is_routine("WARNING x")
    assert is_routine("WARNING x", logging.ERROR)
    assert not is_routine("DEBUG x", logging.NOTSET)
    assert not is_routine("backend cpu")


def test_the_level_of_what_our_services_write_is_found():
    values = {"msg": "x", "levelname": "WARNING", "levelno": logging.WARNING, "name": "a"}
    assert level(JsonLines("scheduler").format(logging.makeLogRecord(values))) == logging.WARNING

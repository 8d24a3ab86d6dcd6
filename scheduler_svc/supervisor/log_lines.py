"""Which lines of a service an operator should read without asking: all but its routine. Pure text, no processes.

A line with a level is routine below WARNING. One without a level (a phase of the start, a traceback, a library's
complaint) never is.
"""

import logging
import re

OURS = re.compile(r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+ )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
# gRPC's and protobuf's own: "I0000 00:00:1761 12 file.cc:83] text", "E1129 19:48:47.924168 23816 file.cc:83] text".
GOOGLES = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d\S* +\d+ \S+:\d+\] ")
# One of a service's --log-format json; level is among its first fields.
JSON = re.compile(r'\{"time": "[^"]*", "level": "(debug|info|warning|error|critical)", ')
LETTERS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


def level(line: str) -> int | None:
    if match := OURS.match(line):
        return logging.getLevelNamesMapping()[match[1]]
    if match := JSON.match(line):
        return logging.getLevelNamesMapping()[match[1].upper()]
    if match := GOOGLES.match(line):
        return LETTERS[match[1]]
    return None


def is_routine(line: str, below: int = logging.WARNING) -> bool:
    number = level(line)
    return number is not None and number < below

import io
import json
import os
import re
import select

from scheduler_svc.supervisor.console import Console
from scheduler_svc.supervisor.model import ConsoleProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_are_plain_lines_and_no_status():
    stream = io.StringIO()
    console = Console(stream)
    console.status("working")
    console.line("executor", "hello")
    console.say("ready")
    assert stream.getvalue() == "executor   │ hello\nready\n"


def test_on_a_terminal_the_status_stays_last():
    stream = Terminal()
    console = Console(stream)
    console.status("one")
    console.line("executor", "hello")
    console.status("two")
    console.status("")
    console.say("done")
    wipe = "\r\x1b[K"
    assert stream.getvalue() == f"one{wipe}\x1b[35mexecutor  \x1b[0m │ hello\none{wipe}two{wipe}done\n"


def test_as_json_every_line_is_an_object_and_a_services_own_is_left_as_it_is():
    stream = Terminal()
    console = Console(stream, as_json=True)
    console.status("working")
    console.line("executor", '{"time": "t", "level": "info"}')
    console.line("executor", "Traceback (most recent call last):")
    console.say("ready")
    own, foreign, said = stream.getvalue().splitlines()
    assert own == '{"time": "t", "level": "info"}'
    assert (json.loads(foreign)["service"], json.loads(foreign)["message"]) == (
        "executor",
        "Traceback (most recent call last):",
    )
    assert (json.loads(said)["service"], json.loads(said)["message"]) == ("serve", "ready")


def test_as_json_words_of_several_lines_are_several_records():
    stream = io.StringIO()
    Console(stream, as_json=True).say("ready in 1 s\ntry: stepwire chat")
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [
        "ready in 1 s",
        "try: stepwire chat",
    ]


def test_when_nobody_reads_lines_are_dropped():
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(Gone())
    console.line("executor", "hello")
    console.say("more")


def test_slow_work_begins_and_ends_with_a_line():
    stream = io.StringIO()
    with ConsoleProgress(Console(stream)).task("fetching", 1000) as advance:
        advance(400)
        advance(600)
    first, last = stream.getvalue().splitlines()
    assert first == "model      │ fetching …"
    assert re.fullmatch(r"model      │ fetching: done in \d+\.\d s.*", last)


def test_a_reader_that_stands_still_holds_nothing_up_and_hears_of_what_it_missed():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", buffering=0) as reader:
        console = Console(stream)
        for i in range(5000):  # far more than a pipe holds
            console.line("executor", f"{i} {'x' * 100}")
        heard = reader.read(1 << 20)
        assert heard.startswith(b"executor   \xe2\x94\x82 0 xxx")
        while select.select([reader], [], [], 0)[0]:
            heard += reader.read(1 << 20)
        num_heard = heard.count(b"\n")
        assert 0 < num_heard < 5000
        console.line("executor", "the last")
        tail = reader.read(1 << 20).decode()
        assert f"({5000 - num_heard} lines were dropped" in tail
        assert tail.endswith("the last\n")
        console.line("executor", "one more")
        assert b"dropped" not in reader.read(1 << 20)

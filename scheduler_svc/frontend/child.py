"""A script in a process of its own, asked one question at a time: what a client's text may make it do ends with it.

Questions and answers are JSON behind 4 bytes of length. A child that does not answer in time, or dies, has answered
{"error": "limit"}; its owner closes it and makes another one.
"""

import json
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("<I")


class Child:
    def __init__(self, script: Path):
        # -P: the script's folder is no place to import from.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdout is not None
        self._answers = select.poll()
        self._answers.register(self._process.stdout, select.POLLIN | select.POLLHUP)

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        body = json.dumps(message).encode()
        try:
            assert self._process.stdin is not None
            _write_all(self._process.stdin, LENGTH.pack(len(body)) + body)
            deadline = time.monotonic() + limit_s
            size = LENGTH.unpack(self._read(LENGTH.size, deadline))[0]
            return json.loads(self._read(size, deadline))
        except (OSError, EOFError, TimeoutError):
            return {"error": "limit"}

    def _read(self, size: int, deadline: float) -> bytes:
        stream = self._process.stdout
        assert stream is not None
        parts: list[bytes] = []
        while size:
            # An answer that is there counts, however late this process comes to look for it.
            if not self._answers.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = stream.read(size)
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _write_all(stream: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]

"""Log lines go to stderr as long as somebody takes them: a full pipe or a full disk must not hold up what they tell of.

Used by the scheduler and by frontends. Knows nothing of what they say.
"""

import logging
import os
import select
import sys


class PatientHandler(logging.Handler):
    """Writes lines to a descriptor without waiting. What cannot leave at once is dropped, and counted in the next."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.num_dropped = 0
        self._descriptor = descriptor
        # A pipe that is ready takes PIPE_BUF bytes without waiting.
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if self.num_dropped:
            text = f"({self.num_dropped} lines were dropped: nobody took them)\n{text}"
        data = f"{text}\n".encode(errors="replace")
        for start in range(0, len(data), select.PIPE_BUF):
            try:
                if not self._poll.poll(0):
                    raise BlockingIOError
                os.write(self._descriptor, data[start : start + select.PIPE_BUF])
            except OSError:
                self.num_dropped += 1
                return
        self.num_dropped = 0


def start_logging(level: int) -> None:
    handler = PatientHandler(sys.stderr.fileno())
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", handlers=[handler])

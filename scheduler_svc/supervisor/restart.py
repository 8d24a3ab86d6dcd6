"""When a dead child is started again, and when that is hopeless. Pure: times are arguments, in seconds."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartPolicy:
    """Of one child. Waits double from `first_delay_s` to `max_delay_s` and start over after a long enough life."""

    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    long_life_s: float = 30.0
    max_restarts: int = 20
    window_s: float = 600.0
    _next_delay_s: float | None = None
    _restarts: deque[float] = field(default_factory=deque)  # when; only those within the window

    def died(self, now: float, lived_s: float) -> float | None:
        """How long to wait before the next start; None: it was restarted `max_restarts` times within the window."""
        while self._restarts and now - self._restarts[0] >= self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            return None
        if self._next_delay_s is None or lived_s >= self.long_life_s:
            self._next_delay_s = self.first_delay_s
        delay_s = self._next_delay_s
        self._next_delay_s = min(2 * delay_s, self.max_delay_s)
        self._restarts.append(now)
        return delay_s

    @property
    def num_recent(self) -> int:
        return len(self._restarts)

"""When a child that is alive counts as dead: it gives no sign of life. Pure: times are arguments, in seconds.

The sign is the modification time of its ready file, which a healthy service renews every second. Only change counts, so
no two clocks are compared; and a supervisor that did not look for a while (the whole machine may have slept) has seen
no silence.
"""

from dataclasses import dataclass

LOOK_EVERY_S = 1.0
# Later than this between two looks, and we were not there ourselves.
LATE_S = 3.0


@dataclass(slots=True)
class Silence:
    limit_s: float
    _last_sign: int | None = None
    _since: float = 0.0
    _looked_at: float | None = None

    def look(self, now: float, sign: int | None) -> bool:
        """`sign` None: the child has never given any, and need not. True: it has been silent for the limit."""
        is_late = self._looked_at is None or now - self._looked_at > LATE_S
        self._looked_at = now
        if sign is None or is_late or sign != self._last_sign:
            self._last_sign, self._since = sign, now
            return False
        return now - self._since >= self.limit_s

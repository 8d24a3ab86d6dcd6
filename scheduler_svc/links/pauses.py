"""Time in which this process did not run: the machine slept, or had others to serve.

Who was silent meanwhile may have spoken, and what it said is on its way; or it did not run either. So such time is
nobody's silence. Pure: times are arguments, in seconds. Knows nothing of who is listened to.
"""

from dataclasses import dataclass

# Later than this to a look, and we were away ourselves.
LATE_S = 1.0


@dataclass(slots=True)
class Pauses:
    """`every_s`: at least so often a process that runs takes a look. `looked_at`: the last one; None: none yet."""

    every_s: float
    looked_at: float | None = None

    def look(self, now: float) -> float:
        """The seconds of a pause that has just ended; 0.0: there was none."""
        before, self.looked_at = self.looked_at, now
        late_s = 0.0 if before is None else now - before - self.every_s
        return late_s if late_s > LATE_S else 0.0

"""How long a step may take before its executor counts as hung. Pure: durations in, limits out."""

from collections import deque

import numpy as np

# The first step of an epoch may compile kernels.
FIRST_STEP_S = 300.0
# Before anything is known about this executor, a step older than this is called stalled (not lost).
UNKNOWN_STALL_S = 30.0
MANY_TIMES = 20
HISTORY = 256
REFRESH_EVERY = 32


class StepBudget:
    """max(least, 20 x recent p99), and never less than 20 x what the tokens of the step should take."""

    def __init__(self, least_s: float = 5.0, first_s: float = FIRST_STEP_S) -> None:
        self._least_s = least_s
        self._most_s = max(first_s, least_s)
        self._durations: deque[float] = deque(maxlen=HISTORY)
        self._num_observed = 0
        self._p99_s = 0.0
        self._seconds_per_token = float("inf")

    def restart(self) -> None:
        """A new epoch: another executor may be slower."""
        self._durations.clear()
        self._p99_s = 0.0
        self._seconds_per_token = float("inf")

    def observe(self, duration_s: float, num_tokens: int) -> None:
        self._durations.append(duration_s)
        if num_tokens:
            # The best rate seen: small steps overstate what a token costs, large ones correct it.
            self._seconds_per_token = min(self._seconds_per_token, duration_s / num_tokens)
        self._num_observed += 1
        if self._num_observed % REFRESH_EVERY == 1 or duration_s > self._p99_s:
            self._p99_s = float(np.quantile(self._durations, 0.99))

    def limit_s(self, num_tokens: int) -> float:
        """A step of `num_tokens` that is older than this is lost."""
        if not self._durations:
            return self._most_s
        return min(self._steady_s(num_tokens), self._most_s)

    def stall_s(self, num_tokens: int) -> float:
        """A step of `num_tokens` that is older than this makes the service unhealthy; compiling is no excuse."""
        if not self._durations:
            return min(max(UNKNOWN_STALL_S, self._least_s), self._most_s)
        return self.limit_s(num_tokens)

    def _steady_s(self, num_tokens: int) -> float:
        expected_s = num_tokens * self._seconds_per_token if num_tokens else 0.0
        return max(self._least_s, MANY_TIMES * self._p99_s, MANY_TIMES * expected_s)

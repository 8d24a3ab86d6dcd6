"""Step time: how many tokens fit in a step that must not take longer than a target.

Fits microseconds = a + b * tokens + c * stored tokens online, by recursive least squares with forgetting, to what the
executor reports. Knows nothing else of the executor.
"""

import numpy as np

FORGETTING = 0.995
MIN_STEPS = 8


class StepTimeModel:
    def __init__(self) -> None:
        self._weights = np.zeros(3)
        # In thousands of tokens, and of stored tokens by the hundred thousand: numbers near one.
        self._scale = np.array([1.0, 1e-3, 1e-5])
        self._covariance = np.eye(3) * 1e6
        self.num_steps = 0

    def learn(self, num_tokens: int, num_stored: int, forward_us: int) -> None:
        x = np.array([1.0, num_tokens, num_stored]) * self._scale
        gain = self._covariance @ x / (FORGETTING + x @ self._covariance @ x)
        self._weights += gain * (forward_us - self._weights @ x)
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / FORGETTING
        # Steps that are all alike teach nothing new: keep what they cannot see from growing without bound.
        self._covariance = (covariance + covariance.T) / 2 * min(1.0, 3e6 / float(np.trace(covariance)))
        self.num_steps += 1

    def predict_us(self, num_tokens: int, num_stored: int) -> float:
        return float(self._weights @ (np.array([1.0, num_tokens, num_stored]) * self._scale))

    def budget(self, target_us: float, num_stored: int) -> int | None:
        """The tokens a step may have; None: not known yet."""
        per_token = float(self._weights[1] * self._scale[1])
        if self.num_steps < MIN_STEPS or per_token <= 0:
            return None
        return max(0, int((target_us - self.predict_us(0, num_stored)) / per_token))

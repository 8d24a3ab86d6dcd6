"""Step time: how many tokens fit in a step that must not take longer than a target.

Fits microseconds = a + b * tokens + c * stored tokens online, by recursive least squares with forgetting, to what the
executor reports. Knows nothing else of the executor. Three numbers are too few for arrays to pay.
"""

FORGETTING = 0.995
MIN_STEPS = 8
# In thousands of tokens, and of stored tokens by the hundred thousand: numbers near one.
PER_TOKEN, PER_STORED = 1e-3, 1e-5
MOST_TRACE = 3e6


class StepTimeModel:
    def __init__(self) -> None:
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[1e6, 0.0, 0.0], [0.0, 1e6, 0.0], [0.0, 0.0, 1e6]]
        self.num_steps = 0

    def learn(self, num_tokens: int, num_stored: int, forward_us: int) -> None:
        x = (1.0, num_tokens * PER_TOKEN, num_stored * PER_STORED)
        weights, covariance = self._weights, self._covariance
        # The covariance is symmetric: covariance @ x is x @ covariance too.
        px = [row[0] * x[0] + row[1] * x[1] + row[2] * x[2] for row in covariance]
        scale = FORGETTING + x[0] * px[0] + x[1] * px[1] + x[2] * px[2]
        error = forward_us - (weights[0] * x[0] + weights[1] * x[1] + weights[2] * x[2])
        self._weights = [w + p / scale * error for w, p in zip(weights, px, strict=True)]
        left = [[(covariance[i][j] - px[i] * px[j] / scale) / FORGETTING for j in range(3)] for i in range(3)]
        # Steps that are all alike teach nothing new: keep what they cannot see from growing without bound.
        shrink = min(1.0, MOST_TRACE / (left[0][0] + left[1][1] + left[2][2]))
        self._covariance = [[value * shrink for value in row] for row in left]
        self.num_steps += 1

    def predict_us(self, num_tokens: int, num_stored: int) -> float:
        a, b, c = self._weights
        return a + b * PER_TOKEN * num_tokens + c * PER_STORED * num_stored

    def budget(self, target_us: float, num_stored: int) -> int | None:
        """The tokens a step may have; None: not known yet."""
        per_token = self._weights[1] * PER_TOKEN
        if self.num_steps < MIN_STEPS or per_token <= 0:
            return None
        return max(0, int((target_us - self.predict_us(0, num_stored)) / per_token))

"""Linear layers in signed bytes on a device: one scale per output of the weight, one per token of what goes in.

    y[t, n] = scale_t * scale_n * sum_k round(x[t, k] / scale_t) * round(w[n, k] / scale_n)   (+ bias[n])

with scale = largest absolute value / 127, over the token's inputs and over the output's weights. The sums are integers,
so a token's result does not depend on its neighbours. cuBLAS multiplies bytes where there are more than 16 rows and
both inner and outer sizes are multiples of 8: what is missing is filled with zeros.
"""

import torch
import torch.nn.functional as F

from executor_svc.model.weights import LinearWeights

LEAST_ROWS, MULTIPLE = 32, 8


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 of x's shape, and the float32 scale of every row. A row that is not finite has a scale that is not."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    steps = (x.float() / scale.clamp(min=torch.finfo(torch.float32).tiny)).round()
    return steps.nan_to_num(0.0).clamp(-127, 127).to(torch.int8), scale


class Int8Linear:
    """y = x @ weight.T + bias for x [T, K] of any floating type, which is also y's; weight [N, K] as it was loaded."""

    def __init__(self, weights: LinearWeights, dtype: torch.dtype):
        self.num_outputs, num_inputs = weights.weight.shape
        steps, scale = quantise(weights.weight)
        missing = (-num_inputs % MULTIPLE, -self.num_outputs % MULTIPLE)
        self.weight = F.pad(steps, (0, missing[0], 0, missing[1])).contiguous()
        self.scale = scale.view(1, -1)
        self.bias = None if weights.bias is None else weights.bias.to(dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        steps, scale = quantise(x)
        num_rows, num_inputs = x.shape
        filled = F.pad(steps, (0, self.weight.shape[1] - num_inputs, 0, max(0, LEAST_ROWS - num_rows)))
        sums = torch._int_mm(filled, self.weight.t())[:num_rows, : self.num_outputs]
        y = (sums.float() * scale * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias

"""Checkpoints whose weights are stored in few bits: each method turns the tensors of a linear layer into its weight.

A model runs on the weights that its checkpoint means, in the type that was asked for: they are dequantised as they are
loaded, layer by layer. Activations are never quantised, whatever the checkpoint was made for.
"""

from executor_svc.model.quantised.method import Method, Settings, quantised_modules
from executor_svc.model.quantised.methods import read_method

__all__ = ["Method", "Settings", "quantised_modules", "read_method"]

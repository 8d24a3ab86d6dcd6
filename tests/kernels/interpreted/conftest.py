"""One thread, the shim, and the interpreter's own numpy deprecation let through."""

import pytest
import torch

from tests.kernels import shim

torch.set_num_threads(1)
shim.install()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    # exp of something large is infinity, and x / infinity is the 0 that is wanted.
    config.addinivalue_line("filterwarnings", "ignore:overflow encountered in exp:RuntimeWarning")

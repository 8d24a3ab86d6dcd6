"""The only module of the benchmarks that touches the environment."""

import os


def interpret_kernels() -> None:
    """Before triton is imported, which decides then: run kernels in its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"

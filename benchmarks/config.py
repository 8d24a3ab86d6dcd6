"""The only module of the benchmarks that touches the environment."""

import os


def interpret_kernels() -> None:
    """Before triton is imported, which decides then: run kernels in its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"


def quiet_threads() -> None:
    """Before torch is imported: waiting threads sleep, as in the executor, so that a busy neighbour costs little."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def environment_with(**variables: str) -> dict[str, str]:
    """This process's environment for a child, with more in it."""
    return {**os.environ, **variables}

"""Faults on purpose: written as KIND:TOKEN, and only when that token is computed."""

import numpy as np
import pytest

from executor_svc.backends.injected_fault import FaultName, InjectedFault
from executor_svc.errors import NotFinite, StartupError


@pytest.mark.parametrize("name", FaultName)
def test_every_kind_has_a_name_and_waits_for_its_token(name):
    fault = InjectedFault.parse(f"{name}:7")
    assert fault == InjectedFault(name, 7)
    fault.strike(np.array([6, 8, 70], np.int32))
    fault.strike(np.empty(0, np.int32))


@pytest.mark.parametrize(("name", "error"), [("nan", NotFinite), ("error", RuntimeError)])
def test_it_strikes_when_the_token_is_computed(name, error):
    with pytest.raises(error):
        InjectedFault.parse(f"{name}:7").strike(np.array([1, 7], np.int32))


@pytest.mark.parametrize("text", ["kill", "kill:", "kill:-1", "kill:x", ":7", "explode:7", ""])
def test_anything_else_is_refused_naming_the_kinds(text):
    with pytest.raises(StartupError, match="kill, exit, hang, error, nan"):
        InjectedFault.parse(text)

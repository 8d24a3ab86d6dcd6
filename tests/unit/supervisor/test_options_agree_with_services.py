"""serve hands options on to services by name: each service must have them, with the same bounds."""

import importlib
import math

import pytest
import typer

from scheduler_svc.supervisor.options import OPTIONS

# Given to each child by serve itself.
OWN = {
    "scheduler": {"--runtime-dir", "--ready-file"},
    "executor": {"--connect", "--connect-beat", "--model", "--ready-file"},
    "frontend": {"--connect", "--host", "--port", "--model", "--served-model-name", "--ready-file"},
}
MODULES = {
    "scheduler": "scheduler_svc.__main__",
    "executor": "executor_svc.__main__",
    "frontend": "scheduler_svc.frontend.__main__",
}


def parameters(part: str) -> dict:
    command = typer.main.get_command(importlib.import_module(MODULES[part]).app)
    return {name: parameter for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]}


@pytest.mark.parametrize("part", MODULES)
def test_the_service_has_every_option_that_serve_hands_on(part):
    handed_on = {f"--{o.name}" for o in OPTIONS if part in o.parts}
    handed_on |= {f"--{o.off_name}" for o in OPTIONS if part in o.parts and o.kind == "flag"}
    assert (handed_on | OWN[part]) - set(parameters(part)) == set()


@pytest.mark.parametrize("part", MODULES)
def test_bounds_are_the_same_on_both_sides(part):
    theirs = parameters(part)
    for option in OPTIONS:
        if part not in option.parts or option.kind not in ("int", "float"):
            continue
        parameter = theirs[f"--{option.name}"]
        low, high = (getattr(parameter.type, name, None) for name in ("min", "max"))
        assert (-math.inf if low is None else low) == option.low, option.name
        assert (math.inf if high is None else high) == option.high, option.name

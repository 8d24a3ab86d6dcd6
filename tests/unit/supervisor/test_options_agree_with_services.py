"""serve hands options on to services by name: each service must have them, with the same bounds."""

import importlib
import typing

import pytest
from typer.models import OptionInfo

from scheduler_svc.supervisor.options import OPTIONS, SIZE

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


def parameters(part: str) -> dict[str, OptionInfo]:
    """The options of a service's command, by each of their names."""
    (command,) = importlib.import_module(MODULES[part]).app.registered_commands
    found = {}
    for hint in typing.get_type_hints(command.callback, include_extras=True).values():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                # Inside Annotated the first declaration sits where a default would be.
                declared = [d for d in (info.default, *(info.param_decls or ())) if isinstance(d, str)]
                found |= {name: info for names in declared for name in names.split("/")}
    return found


def handed_on(part: str, *, in_service: bool) -> set[str]:
    those = [option for option in OPTIONS if part in option.parts and option.in_service == in_service]
    return {f"--{o.name}" for o in those} | {f"--{o.off_name}" for o in those if o.kind == "flag"}


@pytest.mark.parametrize("part", MODULES)
def test_the_service_has_every_option_that_serve_hands_on(part):
    assert (handed_on(part, in_service=True) | OWN[part]) - set(parameters(part)) == set()


@pytest.mark.parametrize("part", MODULES)
def test_an_option_that_serve_refuses_is_in_no_service(part):
    assert handed_on(part, in_service=False) & set(parameters(part)) == set()


@pytest.mark.parametrize("part", MODULES)
def test_bounds_are_the_same_on_both_sides(part):
    theirs = parameters(part)
    for option in OPTIONS:
        if part in option.parts and option.in_service and option.kind in ("int", "float"):
            info = theirs[f"--{option.name}"]
            assert (info.min, info.max) == (option.low, option.high), option.name


def test_every_service_knows_the_variables_of_the_others():
    executor = importlib.import_module("executor_svc.config")
    scheduler = importlib.import_module("scheduler_svc.config")
    assert executor.KNOWN_VARIABLES == scheduler.KNOWN_VARIABLES
    for part in MODULES:
        variables = {info.envvar for info in parameters(part).values() if info.envvar}
        assert variables - scheduler.KNOWN_VARIABLES == set()


@pytest.mark.parametrize("text", ["1", "1.5GiB", "2 tb", "3KiB", "4M", "", "1X", "GiB", "1e9", "-1"])
def test_a_size_is_one_on_both_sides(text):
    from executor_svc.config import parse_bytes
    from executor_svc.errors import StartupError

    try:
        parse_bytes(text)
        accepted = True
    except StartupError:
        accepted = False
    assert bool(SIZE.fullmatch(text.strip())) == accepted

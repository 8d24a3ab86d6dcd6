"""Who may import whom. Read from the source, followed through our own modules, so that a detour does not help."""

import subprocess
import sys

import pytest

from tests.architecture.source import PACKAGES, ROOT, Module, handwritten, modules, top, within

CORE = "scheduler_svc.core"
IMPURE = {
    "zmq",
    "grpc",
    "torch",
    "asyncio",
    "time",
    "random",
    "logging",
    "os",
    "threading",
    "socket",
    "secrets",
    "uuid",
}
CORE_MAY = {"numpy", "protos", "scheduler_svc", *sys.stdlib_module_names} - IMPURE
# Wire messages need the protobuf runtime; nothing of ours stands behind it.
LEAVES = {"google"}


def reached(start: str) -> dict[str, str]:
    """Every name imported from `start`'s package through our own modules, with the module that imports it."""
    by_name = {module.name: module for module in modules()}
    waiting = [name for name in by_name if within(name, start)]
    seen, found = set(waiting), {}
    while waiting:
        module = by_name[waiting.pop()]
        for name in module.imports():
            found.setdefault(name, module.where)
            # Importing a.b.c runs a and a.b as well.
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                ours = ".".join(parts[:i])
                if ours in by_name and ours not in seen:
                    seen.add(ours)
                    waiting.append(ours)
    return found


def importers(package: str) -> list[Module]:
    return [module for module in handwritten() if any(top(name) == package for name in module.imports())]


def test_the_core_is_pure_even_indirectly():
    found = reached(CORE)
    wrong = {name: where for name, where in found.items() if top(name) not in CORE_MAY | LEAVES}
    assert not wrong
    ours = {name for name in found if top(name) == "scheduler_svc"}
    allowed = (CORE, "scheduler_svc.errors")
    assert {name for name in ours if not any(within(name, a) for a in allowed) and name != "scheduler_svc"} == set()


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("protos", {"scheduler_svc", "executor_svc", "kernels", "benchmarks"}),
        ("kernels", {"scheduler_svc", "executor_svc", "protos", "benchmarks"}),
        ("scheduler_svc", {"executor_svc", "kernels", "torch", "benchmarks"}),
        ("executor_svc", {"scheduler_svc", "grpc", "benchmarks"}),
    ],
)
def test_packages_keep_their_distance_even_indirectly(package, forbidden):
    assert {name: where for name, where in reached(package).items() if top(name) in forbidden} == {}


def test_no_service_imports_tests():
    assert [module.where for module in importers("tests") if top(module.name) != "benchmarks"] == []


def test_only_the_links_know_zeromq():
    def may(module: Module) -> bool:
        return within(module.name, "scheduler_svc.links") or module.name in ("scheduler_svc.link", "executor_svc.link")

    assert [module.where for module in importers("zmq") if not may(module)] == []


def test_only_frontends_and_clients_know_grpc():
    may = ("scheduler_svc.frontend", "scheduler_svc.client", "benchmarks")
    assert [m.where for m in importers("grpc") if not any(within(m.name, package) for package in may)] == []


def test_only_config_modules_read_the_environment():
    words = ("os.environ", "os.getenv", "os.environb", "from os import environ", "from os import getenv")
    readers = [m.where for m in handwritten() if any(word in m.text for word in words)]
    assert [where for where in readers if not where.endswith("/config.py")] == []


PROBES = {
    "scheduler_svc imports with torch absent": """
        import importlib.abc, pkgutil, sys
        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "executor_svc", "kernels", "triton"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Refuse())
        import importlib, scheduler_svc
        for module in pkgutil.walk_packages(scheduler_svc.__path__, "scheduler_svc."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        """,
    "executor_svc imports with grpc absent": """
        import importlib.abc, pkgutil, sys
        class Refuse(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("grpc", "scheduler_svc"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Refuse())
        import importlib, executor_svc
        for module in pkgutil.walk_packages(executor_svc.__path__, "executor_svc."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        """,
    "kernels is ours, and transformers does not take it for the package of that name": """
        import kernels, pathlib, transformers, transformers.utils
        assert pathlib.Path(kernels.__path__[0]).resolve() == pathlib.Path("kernels").resolve(), kernels.__path__
        assert not transformers.utils.is_kernels_available()
        """,
    "an executor on the native engine starts without torch": """
        import sys, executor_svc.__main__, executor_svc.serve, executor_svc.backends.cpu
        heavy = {"torch", "transformers", "safetensors", "llguidance", "asyncio"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """,
    "serve, the scheduler and frontends import nothing that they need not": """
        import sys, scheduler_svc.supervisor.serve, scheduler_svc.models.store
        assert "numpy" not in sys.modules
        import subprocess
        for module, name in (("scheduler_svc.process", "asyncio"), ("scheduler_svc.frontend.__main__", "jinja2")):
            program = f"import sys, {module}; assert {name!r} not in sys.modules"
            assert subprocess.run([sys.executable, "-c", program]).returncode == 0
        """,
    "the command starts without anything heavy": """
        import sys, scheduler_svc.cli
        heavy = {"torch", "numpy", "grpc", "zmq", "rich", "asyncio", "google.protobuf", "prometheus_client"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """,
}


@pytest.mark.parametrize("what", PROBES)
def test_in_a_fresh_interpreter(what):
    import textwrap

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROBES[what])], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_package_is_looked_at():
    names = {module.name for module in modules()}
    assert {package for package in PACKAGES if package not in names} == set()

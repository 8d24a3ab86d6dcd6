"""Budgets and habits of the source: sizes, docstrings, what is never written."""

import ast
import re
import statistics
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT, Module, handwritten, tracked_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
MAX_KERNEL_LINES = 120
P90_FUNCTION_LINES = 40

each_module = pytest.mark.parametrize("module", handwritten(), ids=lambda module: module.name)


@each_module
def test_files_and_functions_are_short(module: Module):
    assert len(module.text.splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_LINES if module.name.startswith("kernels") else MAX_FUNCTION_LINES
    assert {name: length for name, length in module.functions() if length > limit} == {}


def test_nine_functions_of_ten_are_shorter_still():
    lengths = [length for module in handwritten() for _, length in module.functions()]
    assert statistics.quantiles(lengths, n=10)[-1] <= P90_FUNCTION_LINES


@each_module
def test_every_module_says_what_it_is_for(module: Module):
    is_empty_package = module.path.name == "__init__.py" and not module.text.strip()
    assert is_empty_package or ast.get_docstring(module.tree)


FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.hub.load"),
    *("yaml.load", "np.load", "numpy.load", "jsonpickle.decode", "recv_pyobj", "send_pyobj"),
}


@each_module
def test_nothing_executes_what_it_reads(module: Module):
    imported = {name.partition(".")[0] for name in module.imports()}
    assert imported & FORBIDDEN_MODULES == set()
    calls = {ast.unparse(node.func) for node in ast.walk(module.tree) if isinstance(node, ast.Call)}
    assert {name for name in calls if name in FORBIDDEN_CALLS or name.endswith(("pyobj",))} == set()
    shell = [
        node.lineno
        for node in ast.walk(module.tree)
        if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code", "allow_pickle")
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert shell == []


@each_module
def test_no_failure_is_swallowed(module: Module):
    def swallows(handler: ast.ExceptHandler) -> bool:
        broad = handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")
        return handler.type is None or (broad and all(isinstance(s, ast.Pass | ast.Continue) for s in handler.body))

    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler)]
    assert [handler.lineno for handler in handlers if swallows(handler)] == []


@each_module
def test_nothing_is_left_for_later(module: Module):
    assert re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", module.text) == []


def test_no_file_knows_this_machine():
    """Absolute paths of somebody's home or work folder mean nothing to anybody else."""
    local = re.compile(r"(?<![\w$}.])/(?:work|root|home/\w+|tmp/(?:wt|venv|w))/")
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in local.finditer(text)]
    assert [line for line in found if not line.startswith("tests/architecture/")] == []


def test_generated_code_is_current():
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "protos.generate", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_our_protos_pass_the_linter():
    done = subprocess.run(
        ["buf", "lint", "protos"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": f"{bin_folder()}:/usr/bin:/bin", "HOME": "/nonexistent", "BUF_CACHE_DIR": "/tmp/buf-cache"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def bin_folder() -> str:
    return sys.executable.rpartition("/")[0]


def test_the_top_level_is_the_one_agreed():
    agreed = {
        *("pyproject.toml", "README.md", "protos", "scheduler_svc", "executor_svc", "kernels", "compose.yaml", "tests"),
        *("Makefile", "LICENSE", ".ci", ".gitignore", ".dockerignore", "docs", "deploy", "benchmarks", "examples"),
        "constraints.txt",
    }
    assert {path.relative_to(ROOT).parts[0] for path in tracked_files()} <= agreed

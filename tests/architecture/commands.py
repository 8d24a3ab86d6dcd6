"""Commands in the pages, found and checked without being run. Knows how our tools are called, not what they do."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from scheduler_svc.cli import app
from tests.architecture.source import ROOT

# What other people's tools are called by; their options are theirs.
FOREIGN = {
    *(
        "smg",
        "vllm-router",
        "envoy",
        "buf",
        "npm",
        "node",
        "kubectl",
        "pip",
        "openssl",
        "git",
        "curl",
        "jq",
        "promtool",
    ),
    *("cosign", "syft", "grype", "sha256sum", "export", "cd", "echo", "cat", "head", "tail", "kill", "wait"),
}
SERVICES = {"scheduler": "scheduler_svc", "executor": "executor_svc", "frontend": "scheduler_svc.frontend"}


@dataclass(frozen=True)
class Command:
    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


def commands() -> Iterator[Command]:
    for page in pages():
        for block in re.findall(r"^ *```sh\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                for words in simple_commands(line):
                    yield Command(str(page.relative_to(ROOT)), words)


def simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """Those of a pipe or a list, without variables in front and without where their output goes."""
    words: list[str] = []
    rest = iter([*shlex.split(line, comments=True), ";"])
    for word in rest:
        if word in (">", ">>", "<", "2>"):
            next(rest)
        elif word in ("|", "||", "&&", "&", ";"):
            if words:
                yield tuple(words)
            words = []
        elif words or not re.fullmatch(r"[A-Z_]+=.*", word):
            words.append(word)


def fault(command: Command) -> str:
    """What is wrong with it; empty: nothing that can be seen."""
    tool, *arguments = command.words
    tool = tool.removeprefix(".venv/bin/")
    if tool == "stepwire":
        return _stepwire(arguments)
    if tool == "make":
        return _make(arguments)
    if tool == "docker":
        return _compose(arguments)
    if tool == "python":
        return _module(arguments[1], arguments[2:]) if arguments[0] == "-m" else _script(arguments)
    return "" if tool in FOREIGN else f"{tool} is no tool that is known here"


def _stepwire(arguments: list[str]) -> str:
    name, *rest = arguments
    if name in SERVICES:
        return _module(SERVICES[name], rest)
    command = _whole()
    context = command.make_context("stepwire", [], resilient_parsing=True)
    words = list(arguments)
    try:
        while hasattr(command, "resolve_command"):
            if words[0] == "--version":
                return ""
            found, command, words = command.resolve_command(context, words)
            context = context.__class__(command, info_name=found, parent=context)
        # Parses and converts every value; runs nothing.
        command.make_context(context.info_name, words, parent=context.parent)
    except typer.BadParameter.__base__ as error:
        return error.format_message()
    return ""


@cache
def _whole() -> Any:
    return typer.main.get_command(app)


def _make(arguments: list[str]) -> str:
    target, *settings = arguments
    makefile = (ROOT / "Makefile").read_text()
    if not re.search(rf"^{target}:", makefile, re.MULTILINE):
        return f"make has no target {target}"
    for name, _, value in (setting.partition("=") for setting in settings):
        if f"$({name})" not in makefile and f"$(if $({name})" not in makefile:
            return f"the Makefile does not use {name}"
        if target == "serve" and name == "ARGS" and value != "...":
            return _stepwire(["serve", *shlex.split(value)])
        if target == "test" and name == "ARGS":
            missing = [word for word in shlex.split(value) if word.startswith("tests/") and not (ROOT / word).exists()]
            if missing:
                return f"{missing[0]} does not exist"
    return ""


def _compose(arguments: list[str]) -> str:
    text = (ROOT / "compose.yaml").read_text()
    for option, value in pairwise(arguments):
        if option == "-f" and not (ROOT / value).exists():
            return f"{value} does not exist"
        if option == "--profile" and f"profiles: [{value}]" not in text:
            return f"no profile {value}"
        if option == "--scale" and f"\n  {value.partition('=')[0]}:\n" not in text:
            return f"no service {value}"
    return ""


def _script(arguments: list[str]) -> str:
    script, *rest = arguments
    if not (ROOT / script).is_file():
        return f"{script} does not exist"
    return _options(ast.parse((ROOT / script).read_text()), script, rest)


def _module(name: str, arguments: list[str]) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return f"no module {name}"
    source = Path(spec.origin)
    if source.name == "__init__.py":
        source = source.with_name("__main__.py")
    if not source.exists():
        return f"python -m {name} runs nothing"
    beside = source.with_name("config.py")  # where a service keeps its option types
    texts = [source.read_text(), *([beside.read_text()] if beside.exists() else [])]
    return _options(ast.parse("\n".join(texts)), name, arguments)


def _options(tree: ast.Module, where: str, arguments: list[str]) -> str:
    """Each --option is spelled in the source, as argparse and typer want it; typer also makes them of parameters."""
    known = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for part in node.value.split("/")
    }
    known |= {f"--{node.arg.replace('_', '-')}" for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            return f"{where} has no option {option}"
    return ""

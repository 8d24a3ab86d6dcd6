"""The project's own source as the architecture tests see it: files, imports, functions. Parses, never imports."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "scheduler_svc", "executor_svc", "kernels", "benchmarks")


@dataclass(frozen=True)
class Module:
    name: str  # dotted; a package's __init__ has the package's name
    path: Path

    @property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.path.name

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[str]:
        """Dotted names that the file imports anywhere, in functions too; `from a import b` gives a and a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package

    def functions(self) -> Iterator[tuple[str, int]]:
        """Names and lengths in lines, decorators and docstring included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield node.name, node.end_lineno - node.lineno + 1


@functools.cache
def modules() -> tuple[Module, ...]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return tuple(found)


def handwritten() -> list[Module]:
    return [module for module in modules() if not module.is_generated]


def tracked_files() -> list[Path]:
    """What is committed; where there is no git (an unpacked archive), every file that is not ignored by habit."""
    try:
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "__pycache__"}
        return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")

"""Regenerates the Python code beside the .proto files: `python -m protos.generate [--check]`.

With --check nothing is written; the exit status is 1 when the committed code differs from what the .proto files give.
Generated imports are rooted at `protos`, so that the packages need no path tricks.
"""

import re
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
WITH_SERVICES = (
    "stepwire/inference/v1/inference.proto",
    "stepwire/admin/v1/admin.proto",
    "vllm/inference.proto",
    "vllm/control.proto",
)


def generate(target: Path) -> dict[str, str]:
    """Runs protoc into `target`; returns generated text by path relative to `protos/`."""
    sources = sorted(str(p.relative_to(ROOT)) for p in ROOT.rglob("*.proto"))
    well_known = str(Path(protoc.__file__).parent / "_proto")
    common = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
    calls = [
        [*common, f"--python_out={target}", f"--pyi_out={target}", *sources],
        [*common, f"--grpc_python_out={target}", *WITH_SERVICES],
    ]
    for call in calls:
        if protoc.main(call) != 0:
            raise SystemExit(f"protoc failed: {' '.join(call)}")
    generated = {}
    for path in sorted([*target.rglob("*_pb2*.py"), *target.rglob("*_pb2.pyi")]):
        text = re.sub(r"^from (stepwire\.|vllm\b)", r"from protos.\1", path.read_text(), flags=re.MULTILINE)
        generated[str(path.relative_to(target))] = text
    return generated


def main() -> int:
    check = "--check" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        generated = generate(Path(folder))
    stale = [name for name, text in generated.items() if not same(ROOT / name, text)]
    if check:
        for name in stale:
            print(f"protos/{name} differs from its .proto: run `make gen`", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (ROOT / name).write_text(generated[name])
        print(f"wrote protos/{name}")
    return 0


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    raise SystemExit(main())

"""Compiles every kernel to machine code without a device, and reads the machine code: `python -m kernels.aot --json`.

A kernel that spills, misses 16-byte accesses or leaves the tensor cores idle is wrong in a way no numeric test sees.
One line per kernel, configuration and architecture; the committed `aot_table.json` is what a change has to explain. It
holds a table for each version of Triton that is in use: the same configuration spills under one and not under another.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from kernels.catalogue import Case, cases
from kernels.configs import ARCHITECTURES

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TABLE = Path(__file__).with_name("aot_table.json")
# Shared memory a block may ask for.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def compile_case(case: Case, target: GPUTarget) -> CompiledKernel:
    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    # What the launcher infers from an address or a stride that is a multiple of 16.
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        attrs=attributes,
        constexprs={(names.index(name),): value for name, value in case.constexprs.items()},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=target, options=options)


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's report has no {pattern}")
    return int(found[1])


def read_cubin(cubin: bytes) -> dict[str, int]:
    """Registers and stack from the resource table, instructions from the disassembly."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout

    def resource(name: str) -> int:
        return number(rf"{name}:(\d+)", usage)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    return {
        "regs": resource("REG"),
        "stack": resource("STACK"),
        "spill": count(r"\b(?:LDL|STL)\b"),
        "hgmma": count(r"\bHGMMA"),
        "hmma": count(r"\bHMMA"),
        "utcmma": count(r"\bUTC\w*MMA"),
        "access16": count(r"\b(?:LDG|STG|LDGSTS)\.E\S*\.128"),
    }


def read_amdgcn(text: str) -> dict[str, int]:
    """The same from AMD assembly, for information: vector registers, and spilled ones."""
    return {
        "regs": number(r"\.vgpr_count:\s*(\d+)", text),
        "stack": number(r"\.private_segment_fixed_size:\s*(\d+)", text),
        "spill": number(r"\.vgpr_spill_count:\s*(\d+)", text),
        "mfma": len(re.findall(r"\bv_mfma", text)),
        "access16": len(re.findall(r"\b(?:global|buffer)_(?:load|store)_dwordx4", text)),
    }


def measure(case: Case, arch: str) -> dict[str, object]:
    """Compile for `arch` (80, 90, 100, gfx942) and report."""
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch), 32)
    compiled = compile_case(case, target)
    figures = read_amdgcn(compiled.asm["amdgcn"]) if arch.startswith("gfx") else read_cubin(compiled.asm["cubin"])
    return {"kernel": case.name, "arch": arch, "config": case.config, "smem": compiled.metadata.shared, **figures}


def complaints(row: dict, case: Case) -> list[str]:
    """What is wrong with a row; AMD rows are informational."""
    if row["arch"].startswith("gfx"):
        return []
    found = []
    if row["stack"] or row["spill"]:
        found.append(f"spills (stack {row['stack']}, {row['spill']} local accesses)")
    if not row["access16"] and not case.scattered:
        found.append("no 16-byte accesses")
    if row["smem"] > SHARED_LIMIT[int(row["arch"])]:
        found.append(f"needs {row['smem']} bytes of shared memory")
    if case.wants_tensor_cores and row["arch"] == "90" and not row["hgmma"]:
        found.append("no HGMMA")
    return found


def measure_all(archs: list[str], only: str) -> Iterator[tuple[dict, list[str]]]:
    for arch in archs:
        # AMD's CDNA 3 has the types that Hopper has.
        for case in cases(90 if arch.startswith("gfx") else int(arch)):
            if only in f"{case.name} {case.config}":
                row = measure(case, arch)
                yield row, complaints(row, case)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="+", default=[str(arch) for arch in ARCHITECTURES])
    parser.add_argument("--only", default="", help="kernels whose name or configuration contains this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument("--write", action="store_true", help=f"put what was compiled into {TABLE.name}")
    options = parser.parse_args()
    rows, bad = [], 0
    for row, wrong in measure_all(options.arch, options.only):
        rows.append(row)
        bad += bool(wrong)
        print(
            json.dumps(row) if options.json else "  ".join(f"{key}={value}" for key, value in row.items()), flush=True
        )
        for complaint in wrong:
            print(f"{row['kernel']} {row['config']} on {row['arch']}: {complaint}", file=sys.stderr)
    if options.write:
        write_table(rows)
    if bad:
        print(f"{bad} of {len(rows)} break the rules", file=sys.stderr)
    return 1 if bad else 0


def row_key(row: dict) -> tuple[str, str, str]:
    return row["arch"], row["kernel"], row["config"]


def write_table(rows: list[dict]) -> None:
    """Replace this version's rows by those given; what is not in the catalogue goes."""
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known = {row_key(row): row for row in [*tables.get(triton.__version__, []), *rows]}
    listed = [(str(arch), case.name, case.config) for arch in ARCHITECTURES for case in cases(arch)]
    tables[triton.__version__] = [known[key] for key in listed if key in known]
    parts = []
    for version in sorted(tables):
        lines = ",\n".join(json.dumps(row) for row in tables[version])
        parts.append(f'"{version}": [\n{lines}\n]')
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())

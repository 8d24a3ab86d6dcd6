"""What the kernels and a decode step reach on this GPU, beside its own ceilings and torch's kernels, in one run.

    python -m benchmarks.gpu [--only decode prefill ...] [--out DIR]     under 10 minutes; table last, JSON and a
                                                                         picture beside it
    python -m benchmarks.gpu --dry                                       interpreter, tiny sizes: does the script work?

Every figure names its unit. Percentages are of the copy rate or the matrix product measured first, in the same run.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.config import interpret_kernels

# Of a row: its name, and where it goes in a picture.
HIDDEN = ("section", "what", "plot", "label", "at")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="no GPU: interpret the kernels at tiny sizes")
    parser.add_argument("--only", nargs="+", default=[], help="sections to run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.dry:
        interpret_kernels()
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("no CUDA device: use --dry to check the script itself", file=sys.stderr)
        return 1
    from benchmarks import gpu_pictures, gpu_sections
    from benchmarks.gpu_bench import Bench

    bench = Bench(dry=options.dry)
    unknown = set(options.only) - set(gpu_sections.SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(gpu_sections.SECTIONS)}")
    for name, (section, budget_s) in gpu_sections.SECTIONS.items():
        if name == "ceilings" or not options.only or name in options.only:
            started = time.perf_counter()
            bench.begin(name, budget_s)
            section(bench)
            print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / ("gpu_dry.json" if options.dry else "gpu.json")
    path.write_text(json.dumps({"machine": bench.machine(), "rows": bench.rows}, indent=1) + "\n")
    gpu_pictures.draw(bench.rows, bench.copy_rate, path.with_suffix(".png"))
    print_table(bench.rows)
    print(f"\n{path}")
    failed = [row for row in bench.rows if row.get("ok") is False]
    return 1 if failed else 0


def print_table(rows: list[dict]) -> None:
    for row in rows:
        figures = "  ".join(f"{key} {value}" for key, value in row.items() if key not in HIDDEN)
        print(f"{row['section']:12} {row['what']:44} {figures}")


if __name__ == "__main__":
    sys.exit(main())

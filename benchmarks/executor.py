"""How fast the decoder alone is: decode steps at several batch sizes, prefill, and where the time goes.

    python -m benchmarks.executor MODEL_DIR [--dtypes bfloat16 int8 float32] [--threads N] [--torch] [--json FILE]

No scheduler, no wire, no sampling: only `Decoder.forward` over paged KV. Medians of several steps; run it on a quiet
machine, and read the load average it prints beside the numbers. Shares are CPU time of the calling thread.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.config import quiet_threads

quiet_threads()

import numpy as np

from executor_svc.kv_cache import KVPool
from executor_svc.model import native
from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import name_of
from executor_svc.model.load import WeightType, load_model
from executor_svc.model.native_decoder import NativeDecoder

DTYPES = ("bfloat16", "float32", "int8")


class Bench:
    """One decoder, a pool of pages, and batches of rows that all have the same length."""

    def __init__(self, path: Path, options: argparse.Namespace, dtype: WeightType):
        self.config = config = ModelConfig.from_directory(path)
        begin = time.perf_counter()
        self.decoder = load_model(path, config, dtype=dtype, num_threads=options.threads, use_native=not options.torch)
        self.load_s = time.perf_counter() - begin
        self.clock = time.thread_time if options.cpu_time else time.perf_counter
        self.size, self.context = options.block_size, options.context
        self.per_row = -(-max(self.context + 1, 512) // self.size)
        num_blocks = self.per_row * max(options.batches)
        self.kv = KVPool(config, num_blocks, self.size, name_of(self.decoder.kv_dtype))
        for pages in self.kv.pages:
            for array in pages:
                array.fill(0)  # touched, as they are in a server that has been running
        self.tables = np.random.default_rng(0).permutation(num_blocks).astype(np.int32).reshape(-1, self.per_row)

    def batch(self, num_rows: int, num_computed: int, count: int) -> SimpleNamespace:
        """Rows that have `num_computed` tokens and compute `count` more; all sample."""
        positions = np.tile(np.arange(num_computed, num_computed + count), num_rows)
        rows = np.repeat(np.arange(num_rows), count)
        starts = np.arange(num_rows + 1) * count
        return SimpleNamespace(
            token_ids=np.random.default_rng(1).integers(0, self.config.vocab_size, rows.size, dtype=np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=self.tables[rows, positions // self.size].astype(np.int64) * self.size + positions % self.size,
            cu_seqlens=starts.astype(np.int32),
            seq_lens=np.full(num_rows, num_computed + count, np.int32),
            block_tables=self.tables[:num_rows],
            sampled=np.ones(num_rows, bool),
            logits_index=(starts[1:] - 1).astype(np.int32),
            num_tokens=rows.size,
        )

    def measure(self, batch: SimpleNamespace, repeats: int) -> tuple[float, dict[str, float]]:
        """Median milliseconds of a step, and milliseconds per kind of operation in it."""
        times, parts = [], np.zeros(len(native.CODE_NAMES), np.int64)
        native_decoder = self.decoder if isinstance(self.decoder, NativeDecoder) else None
        for attempt in range(repeats + 2):
            if native_decoder and attempt == 2:
                native_decoder.nanoseconds = parts
            begin = self.clock()
            self.decoder.forward(batch, self.kv)
            times.append(self.clock() - begin)
        if native_decoder:
            native_decoder.nanoseconds = None
        shares = {n: round(v / repeats / 1e6, 3) for n, v in zip(native.CODE_NAMES, parts.tolist(), strict=True) if v}
        return statistics.median(times[2:]) * 1e3, shares


def run(path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All measurements, as rows."""
    found = []
    for dtype in options.dtypes:
        bench = Bench(path, options, dtype)
        print(f"{bench.decoder.description}; loaded in {bench.load_s:.2f} s; load average {os.getloadavg()[0]:.1f}")
        for size in options.batches:
            ms, parts = bench.measure(bench.batch(size, options.context, 1), options.repeats)
            found.append(
                {"dtype": dtype, "what": "decode", "rows": size, "ms": ms, "tok_s": size / ms * 1e3, "parts": parts}
            )
        for length in (128, 512):
            ms, parts = bench.measure(bench.batch(1, 0, length), max(3, options.repeats // 4))
            found.append(
                {
                    "dtype": dtype,
                    "what": "prefill",
                    "tokens": length,
                    "ms": ms,
                    "tok_s": length / ms * 1e3,
                    "parts": parts,
                }
            )
        for row in found[-len(options.batches) - 2 :]:
            size = row.get("rows") or row["tokens"]
            shares = "  ".join(f"{name} {value:.2f}" for name, value in row["parts"].items())
            print(f"  {row['what']:8}{size:5}  {row['ms']:8.2f} ms  {row['tok_s']:8.0f} tok/s   {shares}")
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "int8", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--torch", action="store_true", help="without the native engine")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the calling thread; for a busy machine, with --threads 1"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(options.model, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

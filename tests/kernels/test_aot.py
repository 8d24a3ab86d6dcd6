"""The committed table of what the compiler made of each kernel. A change to it is a change to explain.

`python -m kernels.aot --json` compiles everything; here a few are, and the table's completeness and rules are checked.
"""

import json
from pathlib import Path

import pytest
import triton
from triton import knobs

from kernels import aot
from kernels.catalogue import Case, cases
from kernels.configs import ARCHITECTURES

TABLE = json.loads(aot.TABLE.read_text())
ROWS = {(row["arch"], row["kernel"], row["config"]): row for row in TABLE["rows"]}
CASES: dict[tuple[str, str, str], Case] = {
    (str(arch), case.name, case.config): case for arch in ARCHITECTURES for case in cases(arch)
}


def test_the_table_lists_the_catalogue() -> None:
    assert set(ROWS) == set(CASES)
    assert len(ROWS) == len(TABLE["rows"])


def test_no_row_breaks_a_rule() -> None:
    assert {key: aot.complaints(row, CASES[key]) for key, row in ROWS.items() if aot.complaints(row, CASES[key])} == {}


@pytest.mark.parametrize(
    ("arch", "kernel", "config"), [("90", "decode_split", "smollm D64 bf16"), ("90", "gated", "silu")]
)
def test_a_sample_still_compiles_to_what_the_table_says(
    arch: str, kernel: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton.__version__ != TABLE["triton"]:
        pytest.skip(f"the table was made by triton {TABLE['triton']}, this is {triton.__version__}")
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    key = next(key for key in CASES if key[:2] == (arch, kernel) and key[2].startswith(config))
    assert aot.measure(CASES[key], arch) == ROWS[key]

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

TABLES = {
    version: {aot.row_key(row): row for row in rows} for version, rows in json.loads(aot.TABLE.read_text()).items()
}
CASES: dict[tuple[str, str, str], Case] = {
    (str(arch), case.name, case.config): case for arch in ARCHITECTURES for case in cases(arch)
}


@pytest.mark.parametrize("version", sorted(TABLES))
def test_the_table_lists_the_catalogue(version: str) -> None:
    assert list(TABLES[version]) == list(CASES)


@pytest.mark.parametrize("version", sorted(TABLES))
def test_no_row_breaks_a_rule(version: str) -> None:
    wrong = {key: aot.complaints(row, CASES[key]) for key, row in TABLES[version].items()}
    assert {key: complaints for key, complaints in wrong.items() if complaints} == {}


@pytest.mark.parametrize(
    ("arch", "kernel", "config"), [("90", "decode_split", "smollm D64 bf16"), ("90", "gated", "silu")]
)
def test_a_sample_still_compiles_to_what_the_table_says(
    arch: str, kernel: str, config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    key = next(key for key in CASES if key[:2] == (arch, kernel) and key[2].startswith(config))
    row = aot.measure(CASES[key], arch)
    assert aot.complaints(row, CASES[key]) == []
    # Another version of Triton makes other machine code; the rules hold for it all the same.
    assert row == TABLES.get(triton.__version__, {key: row})[key]

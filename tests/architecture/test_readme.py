"""The README tells the truth: its options, its links, its make targets, its Python."""

import ast
import re

from scheduler_svc.supervisor.options import OPTIONS
from tests.architecture.source import ROOT

TEXT = (ROOT / "README.md").read_text()


def test_every_option_is_in_the_table_with_its_default_and_help():
    table = [re.split(r"(?<!\\)\|", line)[1:-1] for line in TEXT.splitlines() if line.startswith("| `--")]
    found = [(cells[0].split("`")[1], cells[2].strip(), cells[3].strip()) for cells in table]
    assert found == [(f"--{option.name}", option.default, option.help) for option in OPTIONS]


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake (\w+)", TEXT)) - {"are"}
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_the_agreed_targets_are_all_there():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    assert {"install", "serve", "test", "check", "gen", "bench", "clean"} <= set(phony[1].split())


def test_the_python_parses():
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        ast.parse(block)

"""The commands and the program of the README's section on gateways, so that tests run what users are told to run."""

import shlex

from tests.architecture.source import ROOT

SECTION = "## Behind a gateway"


def section() -> str:
    text = (ROOT / "README.md").read_text()
    assert SECTION in text
    return text.split(SECTION)[1].split("\n## ")[0]


def command(beginning: str) -> list[str]:
    """The words of the one command that begins so; its path to the program is taken off."""
    joined = section().replace("\\\n", " ")
    found = [line for line in joined.splitlines() if beginning in line and not line.startswith(("#", "-", "|"))]
    assert len(found) == 1, (beginning, found)
    words = shlex.split(found[0], comments=True)
    while "=" in words[0]:
        words.pop(0)
    return words


def program() -> str:
    """The one Python program of the section."""
    found = section().split("```python\n")[1:]
    assert len(found) == 1
    return found[0].split("```")[0]

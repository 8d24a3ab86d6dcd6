"""The pages tell the truth: their links lead somewhere, the names in them exist, their commands can be given."""

import re
from functools import cache
from pathlib import Path

import pytest

from protos import reference
from tests.architecture.commands import Command, commands, fault, pages, simple_commands
from tests.architecture.source import ROOT, tracked_files

each_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
each_command = pytest.mark.parametrize("command", dict.fromkeys(commands()), ids=str)
NOT_OURS = {"HTTP/2", "application/grpc", "I/O", "InferencePool"}
SUFFIXES = r"(?:py|proto|yaml|yml|json|c|h|md|txt|mjs|svg|png)"


def prose(page: Path) -> str:
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def names(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def files() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for path in tracked_files())


@cache
def words_of_the_source() -> frozenset[str]:
    """And the names of its files, without their endings."""
    kinds = (".py", ".proto", ".c", ".h", ".yaml", ".yml", ".json")
    ours = [name for name in files() if name.endswith(kinds) and not name.startswith("tests/architecture/")]
    found = {word for name in ours for word in re.findall(r"\w+", (ROOT / name).read_text())}
    return frozenset(found | {Path(name).stem for name in files()})


@each_page
def test_links_lead_somewhere(page: Path):
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_files_that_are_named_exist(page: Path):
    """A path is known by its slash and its suffix or its first folder; it may leave out folders in front."""
    folders = {name.split("/")[0] for name in files() if "/" in name}
    missing = []
    for name in names(page):
        if name in NOT_OURS or not re.fullmatch(r"[\w./-]+", name) or "..." in name:
            continue
        is_path = re.search(rf"[\w-]\.{SUFFIXES}$", name) or ("/" in name and name.split("/")[0] in folders)
        if is_path and name not in OUTSIDE and not is_there(name.removesuffix("/")):
            missing.append(name)
    assert missing == []


# Files of a model's directory, of transformers, or of the reader's own.
OUTSIDE = {
    *("config.json", "generation_config.json", "tokenizer.json", "prompts.jsonl", "trace.jsonl"),
    *("keys.txt", "modeling_*.py", "configuration_*.py", "clients-ca.pem"),
}


def is_there(name: str) -> bool:
    return any(known == name or known.endswith(f"/{name}") or f"/{name}/" in f"/{known}" for known in files())


@each_page
def test_names_of_code_exist(page: Path):
    """`function()`, `ClassName`, `CONSTANT_NAME` and `some_name` are somewhere in the source, as whole words."""
    kinds = r"\w+\(\)|[A-Z][a-z]+[A-Z]\w+|(?!OTEL_)[A-Z]+_[A-Z_]+|_?[a-z]+_[a-z_]+"
    words = {name.removesuffix("()") for name in names(page) if re.fullmatch(kinds, name)} - NOT_OURS
    known = words_of_the_source()
    assert sorted(word for word in words if word not in known and not is_metric(word, known)) == []


def is_metric(word: str, known: frozenset[str]) -> bool:
    """prometheus_client adds an ending to what the source calls it."""
    return any(word.removesuffix(ending) in known for ending in ("_total", "_bucket", "_count", "_sum"))


@each_command
def test_commands_can_be_given(command: Command):
    assert fault(command) == ""


def test_a_line_of_several_commands():
    line = "A=1 stepwire health && echo x | .venv/bin/stepwire generate - > out.txt &  # a comment; really"
    assert list(simple_commands(line)) == [
        ("stepwire", "health"),
        ("echo", "x"),
        (".venv/bin/stepwire", "generate", "-"),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("stepwire serve --no-such", "No such option"),
        ("stepwire top --size", "requires an argument"),
        ("stepwire model make", "No such command"),
        ("stepwire generate x --max-tokens many", "valid integer"),
        ("stepwire executor --no-such 1", "has no option --no-such"),
        ("python -m benchmarks.no_such", "no module"),
        ("python -m kernels.aot --no-such", "has no option"),
        ("python examples/python/batch.py a b --no-such", "has no option"),
        ("make no-such", "no target"),
        ('make serve ARGS="--no-such"', "No such option"),
        ("make test NO_SUCH=1", "does not use"),
        ('make test ARGS="tests/no_such"', "does not exist"),
        ("docker compose -f no-such.yaml up", "does not exist"),
        ("docker compose --profile no-such up", "no profile"),
        ("rm -rf x", "no tool"),
    ],
)
def test_a_wrong_command_is_seen(words: str, says: str):
    import shlex

    assert says in fault(Command("here", tuple(shlex.split(words))))


def test_the_api_reference_is_current():
    assert (ROOT / "docs" / "api.md").read_text() == reference.render(reference.describe(reference.PUBLIC)), "make gen"


def test_every_field_of_the_api_says_what_it_is():
    """But those whose name says it all, which are few."""
    rows = re.findall(r"^\| `(\w+)` \| \d+ \|.*\|  \|$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    speaking = {"token_id", "logprob", "total", "tenant", "num_sequences", "num_running", "num_preemptions"}
    assert set(rows) <= speaking | {"num_prompt_tokens", "num_output_tokens"}

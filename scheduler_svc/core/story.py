"""What happened to a request, step by step: entries as the core writes them down, and sentences for people.

Knows the words of the events; nothing of what makes them happen.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Moment(NamedTuple):
    """A step of an epoch; 0 before the first one."""

    epoch: int
    step_id: int


class Entry(NamedTuple):
    at: Moment
    choice: int
    event: str
    numbers: tuple[int, ...]


# By event: what its numbers are.
SENTENCES = {
    "submitted": "was submitted with {} tokens",
    "admitted to row": "was admitted to row {}: {} of its {} tokens were cached",
    "caught up": "caught up: {} tokens are computed, it decodes",
    "preempted from row": "was preempted from row {}",
    "leaves row": "left row {}, its last token was planned before",
    "lost its executor in row": "lost its executor in row {}",
    "was at work when an executor died": "was at work when an executor died, {} tokens computed; deaths so far: {}",
}
FINISHED = "{} after {} output tokens"


def sentences(story: Iterable[Entry]) -> list[str]:
    """A line an entry, each with EPOCH:STEP, in the order of steps: rows are given up before the last result comes."""
    return [_sentence(entry) for entry in sorted(story, key=lambda entry: entry.at)]


def _sentence(entry: Entry) -> str:
    at = f"step {entry.at.epoch}:{entry.at.step_id}" if entry.at.epoch else "before any step"
    numbers = entry.numbers
    if entry.event in SENTENCES:
        return f"{at}: choice {entry.choice} {SENTENCES[entry.event].format(*numbers)}"
    return f"{at}: choice {entry.choice} {FINISHED.format(entry.event, *numbers)}"

"""Which decode steps are replayed from a recorded graph, and the recordings. Knows no model: it is given a recorder.

A graph fixes its shapes, so a step is padded up to the next size that was recorded. Everything is recorded before the
first request; a step that fits no recording runs eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Recording = TypeVar("Recording")


@dataclass(frozen=True, slots=True)
class GraphKey:
    num_rows: int  # rows, padding included
    max_splits: int  # splits of the longest context that fits


def row_sizes(max_rows: int) -> list[int]:
    """Recorded batch sizes: fine where padding would cost most, coarser beyond, and `max_rows` itself."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, max_rows + 1, 32)]
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


def split_sizes(max_splits: int) -> list[int]:
    """Recorded numbers of splits: powers of four, since a split beyond a row's context costs an empty program."""
    sizes = [1]
    while sizes[-1] < max_splits:
        sizes.append(min(sizes[-1] * 4, max_splits))
    return sizes


class GraphTable(Generic[Recording]):
    def __init__(self, max_rows: int, max_splits: int, record: Callable[[GraphKey], Recording]):
        self._rows = row_sizes(max_rows)
        self._splits = split_sizes(max_splits)
        self._record = record
        self._recordings: dict[GraphKey, Recording] = {}

    def record_all(self) -> None:
        """Largest first: later recordings fit into the memory of earlier ones."""
        for num_rows in reversed(self._rows):
            for max_splits in reversed(self._splits):
                key = GraphKey(num_rows, max_splits)
                self._recordings[key] = self._record(key)

    def __len__(self) -> int:
        return len(self._recordings)

    def key_for(self, num_rows: int, num_splits: int) -> GraphKey | None:
        """The smallest size that holds the step; None if there is none."""
        row, split = bisect_left(self._rows, num_rows), bisect_left(self._splits, num_splits)
        if row == len(self._rows) or split == len(self._splits):
            return None
        return GraphKey(self._rows[row], self._splits[split])

    def find(self, num_rows: int, num_splits: int) -> tuple[GraphKey, Recording] | None:
        key = self.key_for(num_rows, num_splits)
        return (key, self._recordings[key]) if key is not None and key in self._recordings else None

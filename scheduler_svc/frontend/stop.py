"""Finds stop strings in streamed text and holds back exactly what may belong to one.

The earliest-ending match wins; of those ending together, the first in the list. A character is held as long as some
continuation of the text would make it part of the winning match, and no longer. Knows nothing of tokens beyond
"this text may end the choice" (min_tokens is the caller's).
"""

from collections import deque
from collections.abc import Iterator, Sequence


class StopSet:
    """The stop strings of one request as an Aho-Corasick automaton; its choices share it.

    A node is a prefix of some stop string. Being in node n means: n is the longest suffix of the text so far that is a
    prefix of a stop string. So everything about the future follows from n alone.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = list(dict.fromkeys(stops))
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._through: list[list[int]] = [[]]  # stop strings this node is a proper prefix of
        self._winner = [-1]  # stop string that wins when the text arrives here, -1: none ends here
        for number, stop in enumerate(self.stops):
            self._insert(number, stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._held: dict[tuple[int, bool], int] = {}
        # Text without any of these leaves an automaton where nothing is open.
        self.first_chars = frozenset(self._next[0])

    def _insert(self, number: int, stop: str) -> None:
        node = 0
        for char in stop:
            self._through[node].append(number)
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._through.append([])
                self._winner.append(-1)
            node = self._next[node][char]
        self._winner[node] = number

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            inherited = self._winner[self._fail[node]]
            if inherited >= 0 and not 0 <= self._winner[node] < inherited:
                self._winner[node] = inherited
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        while True:
            child = self._next[node].get(char)
            if child is not None:
                return child
            if node == 0:
                return 0
            node = self._fail[node]

    def winner(self, node: int) -> int:
        return self._winner[node]

    def num_held(self, node: int, *, may_stop: bool) -> int:
        """How many of the last characters could be part of the match to come.

        `may_stop` False: text still to come may be barred from ending the choice, so a match ending in it need not win.
        """
        key = (node, may_stop)
        held = self._held.get(key)
        if held is None:
            open_prefixes = (v for v in self._suffixes(node) if self._can_win(node, v, may_stop))
            held = self._held[key] = self._depth[next(open_prefixes, 0)]
        return held

    def _suffixes(self, node: int) -> Iterator[int]:
        while node:
            yield node
            node = self._fail[node]

    def _can_win(self, node: int, prefix: int, may_stop: bool) -> bool:
        return any(self._completes(node, self._depth[prefix], number, may_stop) for number in self._through[prefix])

    def _completes(self, node: int, num_seen: int, number: int, may_stop: bool) -> bool:
        """Whether the stop string, already seen this far, wins if the text goes on with its rest."""
        rest = self.stops[number][num_seen:]
        for i, char in enumerate(rest, 1):
            node = self.step(node, char)
            if i == len(rest):
                return self._winner[node] == number
            if may_stop and self._winner[node] >= 0:
                return False
        return False


class StopMatcher:
    """One choice. After a match, `matched` is the stop string and nothing more may be fed."""

    def __init__(self, stops: StopSet, *, include_stop: bool = False):
        self._stops = stops
        self._include = include_stop
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True, may_stop_next: bool = True) -> str:
        """Takes new text, returns what can be shown. `may_stop`: a match ending in this text counts."""
        assert self.matched is None
        if not self._node and self._stops.first_chars.isdisjoint(text):
            return text
        window = self._held + text
        stops = self._stops
        node = self._node
        for end, char in enumerate(text, len(self._held) + 1):
            node = stops.step(node, char)
            if may_stop and stops.winner(node) >= 0:
                self.matched = stops.stops[stops.winner(node)]
                self._held = ""
                return window[: end if self._include else end - len(self.matched)]
        self._node = node
        num_shown = len(window) if self._include else len(window) - stops.num_held(node, may_stop=may_stop_next)
        self._held = window[num_shown:]
        return window[:num_shown]

    def flush(self) -> str:
        """The end without a match: what was held is ordinary text."""
        held, self._held = self._held, ""
        return held

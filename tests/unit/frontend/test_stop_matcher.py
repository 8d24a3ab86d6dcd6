"""The matcher against a naive oracle that looks at whole texts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.stop import StopMatcher, StopSet


def first_match(text: str, stops: list[str], from_end: int) -> tuple[int, str] | None:
    """(start, stop) of the match that wins among those ending after `from_end`: the earliest end, then list order."""
    for end in range(from_end + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def num_needed(text: str, stops: list[str], barred_next: bool) -> int:
    """How many last characters some continuation would make part of the winning match.

    Only a continuation that completes a stop string begun in `text` can; so those are all there are to try.
    """
    needed = 0
    for stop in stops:
        for seen in range(1, len(stop)):
            if not text.endswith(stop[:seen]):
                continue
            whole = text + stop[seen:]
            barred = len(whole) - 1 if barred_next else len(text)
            match = first_match(whole, stops, barred)
            if match is not None and match[1] == stop and match[0] + len(stop) == len(whole):
                needed = max(needed, seen)
    return needed


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=5)
PIECES = st.lists(st.text("ab\n", max_size=4), max_size=12)


@given(STOPS, PIECES, st.integers(0, 6), st.booleans())
@settings(max_examples=600, deadline=None)
def test_shows_what_the_oracle_shows(stops, pieces, min_tokens, include):
    matcher = StopMatcher(StopSet(stops), include_stop=include)
    shown, text, barred = "", "", 0
    for count, piece in enumerate(pieces, 1):
        may_stop, may_stop_next = count >= min_tokens, count + 1 >= min_tokens
        shown += matcher.feed(piece, may_stop=may_stop, may_stop_next=may_stop_next)
        barred = len(text) if may_stop else len(text) + len(piece)
        text += piece
        match = first_match(text, stops, barred)
        if match is None:
            assert matcher.matched is None
            held = 0 if include else num_needed(text, list(dict.fromkeys(stops)), not may_stop_next)
            assert shown == text[: len(text) - held], "shows all but what a match to come may need"
            continue
        start, stop = match
        assert matcher.matched == stop
        assert shown == text[: start + (len(stop) if include else 0)]
        return
    assert shown + matcher.flush() == text


def test_split_everywhere():
    for size in range(1, 6):
        text = "M N O P Q R"
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        matcher = StopMatcher(StopSet(["O P Q"]))
        shown = ""
        for piece in pieces:
            shown += matcher.feed(piece)
            if matcher.matched:
                break
        assert shown == "M N "
        assert matcher.matched == "O P Q"


def test_holds_nothing_without_need():
    matcher = StopMatcher(StopSet(["ZZZZZZZZZZ"]))
    assert [matcher.feed(c) for c in "abc"] == ["a", "b", "c"]
    assert [matcher.feed("ZZ"), matcher.flush()] == ["", "ZZ"]


def test_a_stop_that_another_always_beats_is_not_waited_for():
    matcher = StopMatcher(StopSet(["abcde", "cd"]))
    assert matcher.feed("ab") == "ab"
    assert matcher.feed("c") == ""
    assert matcher.feed("de") == ""
    assert matcher.matched == "cd"


def test_ties_go_by_list_order():
    for stops, shown in ((["bc", "abc"], "xa"), (["abc", "bc"], "x")):
        matcher = StopMatcher(StopSet(stops))
        assert matcher.feed("xabc") == shown
        assert matcher.matched == stops[0]


def test_min_tokens_bars_what_ends_before():
    matcher = StopMatcher(StopSet(["\n"]))
    shown = ""
    for count, token in enumerate(["a", "\n", "b", "c", "\n", "d"], 1):
        shown += matcher.feed(token, may_stop=count >= 4, may_stop_next=count + 1 >= 4)
        if matcher.matched:
            break
    assert (shown, count) == ("a\nbc", 5)


@pytest.mark.parametrize("num_stops", [1, 16])
def test_cost_does_not_grow_with_the_text(num_stops):
    """Steps are counted, not timed: each character moves at most one node down."""
    rng = random.Random(5)
    stops = StopSet(["a" * 255 + chr(98 + i) for i in range(num_stops)])
    steps = 0
    original = stops.step

    def counted(node: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return original(node, char)

    stops.step = counted  # type: ignore[method-assign]
    matcher = StopMatcher(stops)
    text = "".join(rng.choice("aaaaaaaaac") for _ in range(3000))
    for char in text:
        matcher.feed(char)
    first = steps
    for char in text:
        matcher.feed(char)
    assert steps - first <= 2 * len(text)

"""Constraints: an output that must be a word of a language, followed token by token with llguidance.

A row's constraint is compiled on a thread from its Admit on, while its prompt is computed, and its mask of each step is
computed on a thread while the forward pass runs. The matcher is a function of the row's output tokens alone, so a row
that was preempted or resumed gets a new one that reads them again. Knows no logits, rows or devices.

Frontends have compiled every grammar before they queue it, with the same limits. What goes wrong here all the same (a
mask that costs more than its fuel, say) is a RowFault: it ends that one request.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

import numpy as np

from executor_svc.errors import RowFault

# llguidance's LLParserLimits: what compiling and one mask may cost. Those of the frontend are the same.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 50_000,
}
# How long a step waits for a grammar that is being compiled. Longer than a frontend allows for the same work.
COMPILE_LIMIT_S = 3.0
# A tokenizer.json up to this size is loaded in two goes, each a small part of what the scheduler bears to hear nothing.
SMALL_BYTES = 4 << 20
MAX_KEPT = 64
COMPILE_THREADS = 2


class RowConstraint:
    """One row's way through its language."""

    def __init__(self, matcher: "Future[Any]", end_ids: np.ndarray):
        self.end_ids = end_ids
        self._matcher = matcher
        self._num_consumed = 0
        # An end token was drawn: nothing but end tokens can follow.
        self._ended = False
        self._fault: RowFault | None = None

    def advance(self, output: np.ndarray) -> Any:
        """Reads what was drawn since the last call; the matcher, or None after the end. Raises RowFault."""
        if self._fault is not None:
            raise self._fault
        try:
            return self._advance(output)
        except RowFault as fault:
            self._fault = fault
            raise

    def _advance(self, output: np.ndarray) -> Any:
        try:
            matcher = self._matcher.result(COMPILE_LIMIT_S)
        except NotInTime:
            raise RowFault("the constraint takes too long to compile") from None
        for token in output[self._num_consumed :].tolist():
            if self._ended or token in self.end_ids:
                self._ended = True
            elif not matcher.consume_token(token):
                raise RowFault(f"the constraint cannot be followed: {first_line(matcher.get_error())}")
        self._num_consumed = len(output)
        return None if self._ended else matcher

    def fail(self, fault: RowFault) -> None:
        self._fault = fault


class PendingMask:
    """The mask of one constrained row in one step."""

    def __init__(self, masks: "Future[list[np.ndarray | RowFault]]", index: int, vocab_size: int):
        self._masks, self._index, self._vocab_size = masks, index, vocab_size

    def wait(self) -> np.ndarray:
        """bool [vocab_size]: what may be drawn. Raises RowFault."""
        words = self._masks.result()[self._index]
        if isinstance(words, RowFault):
            raise words
        return np.unpackbits(words.view(np.uint8), bitorder="little", count=self._vocab_size).view(bool)


class Grammars:
    """What constrained rows share: the tokenizer, compiled grammars, threads.

    The tokenizer is 64 MB and half a second in which llguidance lets no other thread of Python run: no step, no
    heartbeat. So nobody loads it on the way to ready, and yet before the first row wants it: `load_in` a moment. One
    that would take seconds, and the executor be given up for dead, is loaded by `load`, before the hello. A row that
    comes before it waits.
    """

    def __init__(self, model: Path | None, vocab_size: int):
        self._path = model / "tokenizer.json" if model is not None else None
        self._vocab_size = vocab_size
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._tokenizer: Future[Any] | None = None
        self._fill: Callable[..., None] | None = None
        # Matchers that have consumed nothing, by grammar, the one used last at the end.
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_small(self) -> bool:
        """May it be loaded while this executor serves?"""
        try:
            return self._path is None or self._path.stat().st_size <= SMALL_BYTES
        except OSError:
            return True

    def load(self) -> None:
        """Waits for the tokenizer. Never raises: without one, constraints are faults of their rows."""
        wait([self._loading()])

    def load_in(self, delay_s: float) -> threading.Timer:
        """Loads it later, on a thread; whoever ends before that cancels the timer."""
        timer = threading.Timer(delay_s, self._loading)
        timer.daemon = True
        timer.start()
        return timer

    def _loading(self) -> "Future[Any]":
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._masker.submit(self._load)
            return self._tokenizer

    def begin(self, grammar: str, end_ids: np.ndarray) -> RowConstraint:
        """Starts to compile. Never raises: what is wrong is found when the first mask is asked for."""
        self._loading()
        return RowConstraint(self._compilers.submit(self._compile, grammar), end_ids)

    def masks(self, asked: Sequence[tuple[RowConstraint, np.ndarray]]) -> list[PendingMask]:
        """Starts to compute the masks of a step: of each constraint after its row's output."""
        work = self._masker.submit(self._compute, list(asked))
        return [PendingMask(work, index, self._vocab_size) for index in range(len(asked))]

    # ---- on threads ------------------------------------------------------------------------------------------

    def _load(self) -> Any:
        try:
            import llguidance
            import llguidance.numpy
        except ModuleNotFoundError:
            raise RowFault("this executor has no llguidance, which constraints need") from None
        try:
            document = self._path.read_text("utf-8") if self._path is not None else ""
            # Two calls instead of one: between them other threads run.
            bare = llguidance.LLTokenizer(document, n_vocab=self._vocab_size, slices=[])
            tokenizer = bare.with_slices(llguidance.LLTokenizer.general_slices())
        except (OSError, ValueError, RuntimeError):
            raise RowFault("this executor has no tokenizer.json that constraints could use") from None
        executor = llguidance.LLExecutor()
        self._fill = lambda matchers, words: llguidance.numpy.fill_next_token_bitmask_par(executor, matchers, words)
        return tokenizer

    def _compile(self, grammar: str) -> Any:
        assert self._tokenizer is not None
        tokenizer = self._tokenizer.result()
        import llguidance

        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return found.deep_copy()
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise RowFault(f"the constraint cannot be compiled: {first_line(matcher.get_error())}")
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return matcher.deep_copy()

    def _compute(self, asked: list[tuple[RowConstraint, np.ndarray]]) -> list[np.ndarray | RowFault]:
        results: list[np.ndarray | RowFault] = []
        words = np.zeros((len(asked), -(-self._vocab_size // 32)), np.int32)
        running: list[tuple[Any, int]] = []
        for index, (constraint, output) in enumerate(asked):
            results.append(words[index])
            try:
                matcher = constraint.advance(output)
            except RowFault as fault:
                results[index] = fault
                continue
            if matcher is None:
                _set_bits(words[index], constraint.end_ids, True)
            else:
                running.append((matcher, index))
        if running:
            assert self._fill is not None
            self._fill(running, words)
        for matcher, index in running:
            constraint = asked[index][0]
            if matcher.is_error():
                too_complex = RowFault(f"the constraint is too complex: {first_line(matcher.get_error())}")
                results[index] = too_complex
                constraint.fail(too_complex)
            else:
                _set_bits(words[index], constraint.end_ids, matcher.is_accepting())
        return results


def _set_bits(words: np.ndarray, ids: np.ndarray, value: bool) -> None:
    """words: int32 [ceil(V / 32)], id v is bit v % 32 of word v // 32."""
    octets = words.view(np.uint8)
    for token in ids.tolist():
        bit = 1 << (token & 7)
        octets[token >> 3] = octets[token >> 3] | bit if value else octets[token >> 3] & (255 ^ bit)


def first_line(error: str) -> str:
    """llguidance's complaint without its excerpts of the grammar."""
    return re.sub(r"\s+", " ", error.strip().partition("\n")[0])[:200]

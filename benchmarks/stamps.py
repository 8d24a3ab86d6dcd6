"""Token ids that tell when they were made: a clock in the vocabulary, which costs a stream nothing.

A tick is 25 us of CLOCK_MONOTONIC, the same in every process of a host. Tick t is the id palette[t mod len(palette)],
so a reader learns the age of a token up to one turn of the palette (0.2 s for 8,192 ids); whoever measures keeps ages
far below that. The palette holds ids with plain text only: none waits for the rest of a character.
"""

import time
from collections.abc import Sequence

from scheduler_svc.frontend.tokenizer import ModelTokenizer

TICK_US = 25
MAX_PALETTE = 1 << 15


def palette_of(tokenizer: ModelTokenizer) -> list[int]:
    """Ids whose text is ASCII letters, perhaps behind one space; as many as there are, up to MAX_PALETTE."""
    found = []
    for token, token_id in sorted(tokenizer.vocab().items(), key=lambda item: item[1]):
        bare = token.removeprefix("\u0120")
        if bare.isascii() and bare.isalpha() and token_id not in tokenizer.special_ids:
            found.append(token_id)
    return found[:MAX_PALETTE]


def ticks() -> int:
    return time.monotonic_ns() // (TICK_US * 1000)


class Ages:
    """Reads ids of one palette."""

    def __init__(self, palette: Sequence[int]):
        self._tick_of = {token_id: tick for tick, token_id in enumerate(palette)}
        self._turn = len(palette)

    def ms(self, token_id: int, now: int) -> float:
        """How old the id is, `now` in ticks."""
        return (now - self._tick_of[token_id]) % self._turn * TICK_US / 1000

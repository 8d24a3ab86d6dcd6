"""Which tokens a row may draw: allowed ids, constraint, bad words and min_tokens, in one place for all backends.

Knows no logits. What leaves nothing to draw is the request's own fault, with one exception: min_tokens gives way, so a
row that could draw nothing but stop tokens draws them.
"""

import numpy as np

from executor_svc.errors import RowFault
from executor_svc.sampling import History

NOTHING_LEFT = "the constraint, allowed_token_ids and bad_words together leave no token to draw"


def permitted(history: History, min_tokens: int, vocab_size: int) -> np.ndarray:
    """bool [vocab_size]. Waits for the mask of the constraint. Raises RowFault."""
    sets = history.sets
    if history.mask is not None:
        mask = history.mask.wait()
    else:
        mask = np.ones(vocab_size, bool)
    if len(sets.allowed):
        allowed = np.zeros(vocab_size, bool)
        allowed[sets.allowed] = mask[sets.allowed]
        mask = allowed
    if len(sets.bad_words):
        mask[sets.bad_words.banned(history.output)] = False
    if not mask.any():
        raise RowFault(NOTHING_LEFT)
    if len(history.output) < min_tokens and len(sets.stop):
        without = mask.copy()
        without[sets.stop] = False
        if without.any():
            return without
    return mask

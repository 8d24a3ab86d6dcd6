"""Bad words: token sequences that an output never contains. Knows ids; where they come from is the frontend's matter.

The rule is vLLM's: when the output ends with all but the last id of a sequence, that last id cannot be drawn. Only
output tokens are looked at: a sequence that would begin in the prompt is not noticed.
"""

import numpy as np

from executor_svc.errors import PlanViolation

# 128 strings of at most 256 bytes, each tokenised in two ways; a token stands for at least one byte, but for a marker.
MAX_SEQUENCES = 256
MAX_LENGTH = 512


class BadWords:
    """The sequences of one row, arranged so that a look at an output is a handful of array operations."""

    def __init__(self, sequences: list[np.ndarray]):
        """sequences: int32 each, not empty."""
        longest = max((len(sequence) for sequence in sequences), default=1)
        self._last = np.array([sequence[-1] for sequence in sequences], np.int32)
        # What an output must end with, newest first, -1 where a sequence is shorter: [n, longest - 1].
        self._before = np.full((len(sequences), longest - 1), -1, np.int32)
        for row, sequence in zip(self._before, sequences, strict=True):
            row[: len(sequence) - 1] = sequence[-2::-1]

    def __len__(self) -> int:
        return len(self._last)

    def banned(self, output: np.ndarray) -> np.ndarray:
        """int32: the ids that cannot be drawn after `output`, some perhaps twice."""
        width = self._before.shape[1]
        # -2 equals nothing: an output that is too short matches no longer sequence.
        newest = np.full(width, -2, np.int32)
        tail = output[max(0, len(output) - width) :][::-1]
        newest[: len(tail)] = tail
        return self._last[((self._before == newest) | (self._before == -1)).all(axis=1)]


def parse(data: bytes, vocab_size: int) -> BadWords:
    """From the wire: int32[], each sequence behind its length. Raises PlanViolation."""
    if len(data) % 4:
        raise PlanViolation(f"sampling.bad_words: {len(data)} bytes are not int32s")
    values = np.frombuffer(data, "<i4")
    sequences: list[np.ndarray] = []
    place = 0
    while place < len(values):
        length = int(values[place])
        sequence = values[place + 1 : place + 1 + length]
        if not 1 <= length <= MAX_LENGTH or len(sequence) != length or len(sequences) == MAX_SEQUENCES:
            raise PlanViolation("sampling.bad_words: a sequence is empty, cut off, too long or one too many")
        if sequence.min() < 0 or sequence.max() >= vocab_size:
            raise PlanViolation(f"sampling.bad_words: an id is not within 0..{vocab_size - 1}")
        sequences.append(sequence)
        place += 1 + length
    return BadWords(sequences)

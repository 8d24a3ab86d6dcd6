"""Merge rules from a sentencepiece vocabulary, which has ranks of pieces instead of rules for pairs.

sentencepiece joins, again and again, the neighbours whose joined piece ranks best. As a list of rules that is: every
way of cutting a piece into two pieces of the vocabulary, best-ranked piece first; cuts of one piece in the order of
the ids of their halves.
"""


def merges_from_ranks(ids: dict[str, int], ranks: dict[str, float]) -> list[tuple[str, str]]:
    """`ids` are the pieces that merging may use and make; a higher rank merges earlier."""
    rules: list[tuple[float, int, int, int]] = []
    pieces = {}
    for piece, index in ids.items():
        pieces[index] = piece
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                rules.append((-ranks[piece], index, left, right))
    # Equal ranks keep the order of the vocabulary.
    rules.sort()
    return [(pieces[left], pieces[right]) for _, _, left, right in rules]

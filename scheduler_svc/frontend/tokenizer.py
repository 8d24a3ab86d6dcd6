"""Text to ids and back for one model, from its tokenizer.json alone.

Control tokens are the danger here: text from a client must never turn into one unless the client may say so. Two
encoders are loaded. `parsing` is the file as it stands. In `plain` every special token is renamed to a random
alias, in the added tokens and in the model's own vocabulary, so nothing a client can write is special to it; text
that we ourselves put aliases into (a rendered chat template) is encoded by the same encoder, in one call, with
exactly the ids that `parsing` would give.

Knows nothing of requests or of the model's vocabulary size, which may be larger than the tokenizer's.
"""

import json
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from scheduler_svc.errors import StartupError


class ModelTokenizer:
    def __init__(self, document: str):
        self.document: dict[str, Any] = json.loads(document)
        self._parsing = _load(document)
        added = self.document.get("added_tokens") or []
        self.special_tokens: dict[str, int] = {t["content"]: t["id"] for t in added if t.get("special")}
        self.special_ids = frozenset(self.special_tokens.values())
        self._aliases = {text: f"<{secrets.token_hex(16)}-{i}>" for text, i in self.special_tokens.items()}
        self._plain = _load(json.dumps(with_aliases(self.document, self._aliases), ensure_ascii=False))
        # No tokeniser makes fewer tokens of a text than its bytes over this.
        self.max_token_bytes = max((len(token.encode()) for token in _spellings(self.document)), default=1) or 1

    @classmethod
    def load(cls, model_dir: Path) -> "ModelTokenizer":
        path = model_dir / "tokenizer.json"
        try:
            return cls(path.read_text("utf-8"))
        except FileNotFoundError:
            raise StartupError(f"{path}: no tokenizer here; choose a model that has a tokenizer.json") from None
        except Exception as error:  # the tokenizers library raises plain Exception
            raise StartupError(f"{path}: not a readable tokenizer ({error}); fetch the model again") from None

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False) -> list[int]:
        """Ids of a text. `parse_special_tokens` lets control tokens spelled out in it become control tokens."""
        if not parse_special_tokens:
            return _encode(self._plain, text, add_special_tokens)
        ids = _encode(self._parsing, text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] and ids[0] in self.special_ids:
            bare = _encode(self._parsing, text, False)
            if len(bare) < len(ids) and bare[0] == ids[0]:
                del ids[0]  # the text brought its own BOS
        return ids

    @cached_property
    def special_pattern(self) -> "re.Pattern[str] | None":
        """Matches any special token, the longest first."""
        texts = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts))) if texts else None

    def alias_specials(self, text: str) -> str:
        """Trusted text with its special tokens spelled so that `encode_aliased` makes control ids of them."""
        if self.special_pattern is None:
            return text
        return self.special_pattern.sub(lambda match: self._aliases[match.group()], text)

    def encode_aliased(self, text: str) -> list[int]:
        return _encode(self._plain, text, False)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Ids beyond the tokenizer decode to nothing."""
        return self._parsing.decode([i for i in ids if 0 <= i < 2**32], skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """How the vocabulary spells an id; None for an id it does not have."""
        return self._parsing.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def token_id(self, token: str) -> int | None:
        return self._parsing.token_to_id(token)

    def vocab(self) -> dict[str, int]:
        return self._parsing.get_vocab(with_added_tokens=True)


def _spellings(document: dict[str, Any]) -> Iterator[str]:
    """Every token as its vocabulary spells it. The tokenizer would tell as well, and take ten times as long."""
    vocab = document["model"].get("vocab") or ()
    yield from (entry if isinstance(entry, str) else entry[0] for entry in vocab)
    yield from (token["content"] for token in document.get("added_tokens") or ())


def _load(document: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(document)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # The batch call releases the GIL and computes no offsets.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def with_aliases(document: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """The tokenizer's document with special tokens renamed wherever text could reach them; ids stay."""
    model = dict(document["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(token, token): i for token, i in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: [piece, score]
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [m for m in model["merges"] if _merged(m) not in aliases]
    added = [
        {**token, "content": aliases.get(token["content"], token["content"])} if token.get("special") else token
        for token in document.get("added_tokens") or []
    ]
    return {**document, "model": model, "added_tokens": added}


def _merged(merge: str | list[str]) -> str:
    """What a merge makes; files spell merges as "a b" or as ["a", "b"]."""
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)

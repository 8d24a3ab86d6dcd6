"""Output ids to text deltas, one token at a time, in constant time per token.

Concatenated, the deltas of a choice equal decode(prompt + output) - decode(prompt). Where the prompt ends inside a
character the difference begins at the first place where the two texts differ.

Three ways, by what the tokenizer's decoder can see:
    bytes    byte-level vocabularies: a token is bytes, the text is those bytes as UTF-8
    pieces   a token's text depends only on whether it is the first; runs of byte-fallback tokens are decoded whole,
             because one bad byte turns the complete run into replacement characters
    window   any other decoder: decoded again together with the last few tokens

The first two know most tokens by heart: their text is the same wherever they stand, once nothing is open before them.

Whatever ids come, nothing here raises: ids without a token have no text.
"""

import codecs
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler_svc.frontend.tokenizer import ModelTokenizer

REPLACEMENT = "\ufffd"
_WINDOW = 32  # tokens of context for decoders we know nothing of


class TextStream(ABC):
    """One choice's way from ids to text."""

    def __init__(self, plain: dict[int, str], skip: frozenset[int]) -> None:
        # Texts of tokens that have one wherever they stand; all streams of a tokenizer share it.
        self._plain = plain
        self._skip = skip
        # Nothing that came before can change the text of the next token.
        self._is_clean = False

    def push_all(self, ids: Sequence[int]) -> str:
        """The text of several tokens, one after the other."""
        if self._is_clean and self._skip.isdisjoint(ids):
            texts = [self._plain.get(i) for i in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        return "".join([self.push(i) for i in ids])

    @abstractmethod
    def push(self, token_id: int) -> str: ...

    @abstractmethod
    def flush(self) -> str:
        """The end: what was waiting for more, a cut character as U+FFFD."""


class Detokenizer:
    """Holds what all streams of one tokenizer share: its tokens' bytes and pieces, found out once each."""

    def __init__(self, tokenizer: ModelTokenizer):
        self.tokenizer = tokenizer
        self.kind = decoder_kind(tokenizer.document.get("decoder"))
        self._table: ByteTable | PieceTable | None = None
        if self.kind == "bytes":
            self._table = ByteTable(tokenizer)
        elif self.kind == "pieces":
            self._table = PieceTable(tokenizer)

    def stream(self, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        skip = self.tokenizer.special_ids if skip_special_tokens else frozenset()
        if isinstance(self._table, ByteTable):
            return ByteStream(self._table, prompt, skip)
        if isinstance(self._table, PieceTable):
            return PieceStream(self._table, prompt, skip)
        return WindowStream(self.tokenizer, prompt, skip)


def decoder_kind(decoder: dict[str, Any] | None) -> str:
    if decoder is None:
        return "pieces"
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    types = [step["type"] for step in steps]
    if types == ["ByteLevel"]:
        return "bytes"
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            # Right stripping looks ahead; more than one character on the left may reach into the second token.
            if fused and (step.get("stop", 0) > 0 or step.get("start", 0) > 1):
                return "window"
        elif fused or kind not in ("Replace", "ByteFallback", "Metaspace", "WordPiece"):
            return "window"
    return "pieces"


# ---- byte-level ----


class ByteTable:
    """The bytes of each token of a byte-level vocabulary."""

    def __init__(self, tokenizer: ModelTokenizer):
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        # Of the tokens above, those that are whole characters.
        self.plain: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.token(token_id)
            if token is None:
                return b""  # not kept: such ids come in any number
            found = self._bytes[token_id] = _bytes_of(token)
            with contextlib.suppress(UnicodeDecodeError):
                self.plain[token_id] = found.decode()
        return found


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()  # with a character outside the byte alphabet (an added token) it stands for itself


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 is itself, other bytes are the code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
_Utf8 = codecs.getincrementaldecoder("utf-8")


class ByteStream(TextStream):
    def __init__(self, table: ByteTable, prompt: Sequence[int], skip: frozenset[int]):
        super().__init__(table.plain, skip)
        self._table = table
        self._utf8 = _Utf8("replace")
        # UTF-8 resynchronises: the last few bytes of the prompt tell whether it ends inside a character.
        tail = b""
        for token_id in reversed(prompt):
            if token_id not in skip:
                tail = table[token_id] + tail
            if len(tail) >= 8:
                break
        self._utf8.decode(tail)
        # The prompt's own text shows the cut character as one U+FFFD already.
        self._owes_replacement = bool(self._utf8.getstate()[0])
        self._is_clean = not self._owes_replacement

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        if self._is_clean and (plain := self._plain.get(token_id)) is not None:
            return plain
        text = self._take(self._utf8.decode(self._table[token_id]))
        self._is_clean = not (self._owes_replacement or self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._take(self._utf8.decode(b"", final=True))

    def _take(self, text: str) -> str:
        if text and self._owes_replacement:
            self._owes_replacement = False
            return text.removeprefix(REPLACEMENT)
        return text


# ---- sentencepiece-style ----


class PieceTable:
    """The text of each token when it is not the first, and which tokens are byte-fallback bytes."""

    def __init__(self, tokenizer: ModelTokenizer):
        self._tokenizer = tokenizer
        self.plain: dict[int, str] = {}  # bytes and ids without a token are not among them
        decoder = tokenizer.document.get("decoder") or {}
        self._byte_ids = self._find_byte_ids() if "ByteFallback" in _types(decoder) else frozenset()
        self._anchor, self._anchor_text = self._find_anchor()

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._byte_ids

    def exists(self, token_id: int) -> bool:
        return self._tokenizer.token(token_id) is not None

    def __getitem__(self, token_id: int) -> str:
        found = self.plain.get(token_id)
        if found is None:
            found = self.plain[token_id] = self.later([token_id])
        return found

    def first(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def later(self, ids: list[int]) -> str:
        """The text of a run of tokens that something stands before."""
        return self.first([*self._anchor, *ids])[len(self._anchor_text) :]

    def _find_byte_ids(self) -> frozenset[int]:
        found = ((self._tokenizer.token_id(f"<0x{b:02X}>")) for b in range(256))
        return frozenset(i for i in found if i is not None)

    def _find_anchor(self) -> tuple[list[int], str]:
        """A token that stands for itself wherever it is, to put before others."""
        for token, token_id in sorted(self._tokenizer.vocab().items(), key=lambda item: item[1]):
            plain = token.isascii() and token.isalpha() and token_id not in self._tokenizer.special_ids
            if plain and self.first([token_id]) == token:
                return [token_id], token
        return [], ""


def _types(decoder: dict[str, Any]) -> list[str]:
    return [step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step]


class PieceStream(TextStream):
    def __init__(self, table: PieceTable, prompt: Sequence[int], skip: frozenset[int]):
        super().__init__(table.plain, skip)
        self._table = table
        self._run: list[int] = []
        run_start = len(prompt)
        for token_id in reversed(prompt):
            if self._counts(token_id) and not table.is_byte(token_id):
                break
            run_start -= 1
        self._run = [i for i in prompt[run_start:] if self._counts(i)]
        self._at_start = not any(self._counts(i) for i in _take_until(prompt, run_start))
        self._run_shown = self._run_text() if self._run else ""
        self._is_clean = not self._run and not self._at_start

    def push(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        if self._table.is_byte(token_id):
            self._run.append(token_id)
            self._is_clean = False
            return ""
        text = self._close_run() if self._run else ""
        self._is_clean = True
        if self._at_start:
            self._at_start = False
            return text + self._table.first([token_id])
        return text + self._table[token_id]

    def flush(self) -> str:
        return self._close_run() if self._run else ""

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skip and (token_id in self._plain or self._table.exists(token_id))

    def _run_text(self) -> str:
        return self._table.first(self._run) if self._at_start else self._table.later(self._run)

    def _close_run(self) -> str:
        text = self._run_text()
        shown, self._run_shown = self._run_shown, ""
        self._run = []
        self._at_start = False
        return text[common_prefix(shown, text) :] if shown else text


def _take_until(ids: Sequence[int], end: int) -> Iterable[int]:
    return (ids[i] for i in range(end))


def common_prefix(a: str, b: str) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


# ---- anything else ----


class WindowStream(TextStream):
    """Decodes the last few tokens again and again: exact for decoders that look back less than the window."""

    def __init__(self, tokenizer: ModelTokenizer, prompt: Sequence[int], skip: frozenset[int]):
        super().__init__({}, skip)
        self._tokenizer = tokenizer
        self._ids = [i for i in prompt[-4 * _WINDOW :] if self._counts(i)][-_WINDOW:]
        self._shown = self._decode()

    def push(self, token_id: int) -> str:
        if not self._counts(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode()
        waits = text.endswith(REPLACEMENT) and len(self._ids) < 2 * _WINDOW
        return "" if waits else self._show(text)

    def flush(self) -> str:
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        delta = text[common_prefix(self._shown, text) :]
        self._shown = text
        if len(self._ids) >= 2 * _WINDOW:
            self._ids = self._ids[-_WINDOW:]
            self._shown = self._decode()
        return delta

    def _counts(self, token_id: int) -> bool:
        return token_id not in self._skip and self._tokenizer.token(token_id) is not None

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=False)

"""Messages to prompt ids, with the model's own chat template.

Contents are text and stay text. Before rendering, every special token spelled out in anything a client sent is
replaced by a placeholder; after it, whatever special tokens the text has are the template's own and get their
aliases, and the placeholders become plain text again (see tokenizer.py). The template runs in a child process with
bounds on time, memory and output. Knows nothing of gRPC.
"""

import logging
import re
import secrets
import threading
from pathlib import Path
from typing import Any

from scheduler_svc.errors import InvalidArgument, Unimplemented
from scheduler_svc.frontend.child import Child
from scheduler_svc.frontend.model_files import ModelFiles

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("template_worker.py")

CPU_LIMIT_S = 0.5
WALL_LIMIT_S = 5.0
START_LIMIT_S = 30.0
MEMORY_LIMIT_BYTES = 512 << 20
# Set by us, never by a client.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize"})


def allowed_names(names: list[str]) -> frozenset[str]:
    """Of the names a template reads, those a client may set: neither ours nor a special token's."""
    return frozenset(name for name in names if name not in RESERVED and not name.endswith("_token"))


class ChatTemplate:
    """Thread-safe. Renders one request at a time: a rendering takes well under a millisecond."""

    def __init__(self, model: ModelFiles):
        self._source = model.chat_template
        self._specials = model.special_strings
        self._tokenizer = model.tokenizer
        self._shield = Shield(model.tokenizer.special_tokens)
        self._worker: _Worker | None = None
        self._lock = threading.Lock()
        self.allowed_variables: frozenset[str] = frozenset()
        # Why there is no chat; empty when there is.
        self.problem = "" if self._source else "the model has no chat template"

    def start(self) -> None:
        """Compiles the template. A bad one disables chat, not the server."""
        if not self._source:
            return
        try:
            with self._lock:
                names = self._running().variables
            self.allowed_variables = allowed_names(names)
        except _TemplateBroken as error:
            log.warning("chat is off: the model's chat template does not compile: %s", error)
            self.problem = "the model's chat template does not compile"

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def token_ids(
        self,
        messages: list[dict[str, str]],
        *,
        tools: list[Any] | None,
        add_generation_prompt: bool,
        extra: dict[str, Any],
        max_chars: int,
    ) -> list[int]:
        if self.problem:
            raise Unimplemented(f"Chat is not available: {self.problem}; use Generate")
        values = self._shield.put_on(extra) | self._specials
        values |= {
            "messages": self._shield.put_on(messages),
            "tools": self._shield.put_on(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(values, max_chars)
        return self._tokenizer.encode_aliased(self._shield.take_off(self._tokenizer.alias_specials(text)))

    def _render(self, values: dict[str, Any], max_chars: int) -> str:
        with self._lock:
            try:
                answer = self._running().ask({"values": values, "max_chars": max_chars}, WALL_LIMIT_S)
            except _TemplateBroken:
                answer = {"error": "limit"}
            if answer.get("error") == "limit" and self._worker is not None:
                self._worker.close()  # its memory may be at the limit
                self._worker = None
        if "text" in answer:
            return answer["text"]
        if answer["error"] == "refused":
            reason = self._shield.take_off(answer["message"])
            raise InvalidArgument(f"messages: the chat template refuses them: {reason}", field="messages")
        if answer["error"] == "limit":
            raise InvalidArgument("messages: rendering the chat template exceeds its limits", field="messages")
        raise InvalidArgument(f"messages: the chat template cannot render them ({answer['message']})", field="messages")

    def _running(self) -> "_Worker":
        if self._worker is not None and self._worker.is_dead:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker = _Worker(self._source)
        return self._worker


class Shield:
    """Keeps special tokens spelled out by clients apart from the template's own, through a rendering."""

    def __init__(self, special_tokens: dict[str, int]):
        self._texts = sorted(filter(None, special_tokens), key=len, reverse=True)
        nonce = secrets.token_hex(8)
        self._open, self._close = f"\ue000{nonce}.", "\ue001"
        # A character's worth of nothing: keeps a half of a token apart from whatever the template puts beside it.
        self._gap = f"{self._open}{self._close}"
        self._find = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self._heads = {text[:i] for text in self._texts for i in range(1, len(text))}
        self._tails = {text[i:] for text in self._texts for i in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self._restore = re.compile(re.escape(self._open) + r"(\d*)" + re.escape(self._close))

    def put_on(self, value: Any) -> Any:
        """The same JSON value with every string in it shielded."""
        if isinstance(value, str):
            return self._cover(value)
        if isinstance(value, list):
            return [self.put_on(item) for item in value]
        if isinstance(value, dict):
            return {self._cover(key): self.put_on(item) for key, item in value.items()}
        return value

    def take_off(self, text: str) -> str:
        if self._open not in text:
            return text
        return self._restore.sub(lambda match: self._texts[int(match[1])] if match[1] else "", text)

    def _cover(self, text: str) -> str:
        if self._find is None:
            return text
        numbers = self._texts
        covered = self._find.sub(lambda match: f"{self._open}{numbers.index(match.group())}{self._close}", text)
        return self._part(covered)

    def _part(self, text: str) -> str:
        """Gaps where the text begins or ends with a piece of a special token; templates may trim white space there."""
        body = text.strip()
        lead = len(text) - len(text.lstrip())
        if any(body.endswith(head) for head in _suffixes(body, self._longest) if head in self._heads):
            at = lead + len(body)
            text = text[:at] + self._gap + text[at:]
        if any(tail in self._tails for tail in _prefixes(body, self._longest)):
            text = text[:lead] + self._gap + text[lead:]
        return text


def _suffixes(text: str, longest: int) -> list[str]:
    return [text[-i:] for i in range(1, min(longest, len(text)) + 1)]


def _prefixes(text: str, longest: int) -> list[str]:
    return [text[:i] for i in range(1, min(longest, len(text)) + 1)]


class _TemplateBroken(Exception):
    pass


class _Worker(Child):
    """template_worker.py with a template in it."""

    def __init__(self, source: str):
        super().__init__(WORKER)
        setup = {"template": source, "cpu_s": CPU_LIMIT_S, "memory_bytes": MEMORY_LIMIT_BYTES}
        answer = self.ask(setup, START_LIMIT_S)
        if "variables" not in answer:
            self.close()
            raise _TemplateBroken(answer.get("error", "no answer"))
        self.variables: list[str] = answer["variables"]

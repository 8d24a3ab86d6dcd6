"""API keys: who may call, and as which tenant. One line a key, `ID TENANT SHA256`; `#` begins a comment.

A key is `sw-ID-SECRET` with 256 random bits, so a plain SHA-256 of it can be kept in the open and compared at no cost.
The id is public: it finds the line, names a key in lists, and says nothing of the secret. A tenant may have several
keys, so that one can be replaced by the next. Knows nothing of gRPC.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.errors import StartupError
from scheduler_svc.watched import Watched

KEY = re.compile(r"sw-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# What an unknown id is compared with: a refusal costs the same whether the id is known or not.
NOBODY = bytes(32)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    key_id: str
    tenant: str
    digest: bytes  # SHA-256 of the whole key
    comment: str = ""

    def line(self) -> str:
        return f"{self.key_id} {self.tenant} {self.digest.hex()}" + (f"  # {self.comment}" if self.comment else "")


def make_key(tenant: str, comment: str = "") -> tuple[str, KeyEntry]:
    """A fresh key, to be told once, and what is kept of it."""
    if not TENANT.fullmatch(tenant):
        raise StartupError(f"tenant {tenant!r} must be 1 to 64 letters, digits, dots, dashes or underscores")
    key_id = secrets.token_hex(4)
    key = f"sw-{key_id}-{secrets.token_urlsafe(32)}"
    return key, KeyEntry(key_id, tenant, digest_of(key), comment)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def parse(text: str, source: str) -> list[KeyEntry]:
    """Raises StartupError naming `source` and the line."""
    entries: list[KeyEntry] = []
    for number, line in enumerate(text.splitlines(), 1):
        content, _, comment = line.partition("#")
        if not content.strip():
            continue
        entry = _entry(content.split(), comment.strip())
        if entry is None:
            raise StartupError(f"{source} line {number} is not `ID TENANT SHA256`: make keys with `stepwire keys make`")
        if any(other.key_id == entry.key_id for other in entries):
            raise StartupError(f"{source} line {number}: another key has the id {entry.key_id}")
        entries.append(entry)
    return entries


def _entry(fields: list[str], comment: str) -> KeyEntry | None:
    if len(fields) != 3:
        return None
    key_id, tenant, digest = fields
    if not (re.fullmatch("[0-9a-f]{8}", key_id) and TENANT.fullmatch(tenant) and re.fullmatch("[0-9a-f]{64}", digest)):
        return None
    return KeyEntry(key_id, tenant, bytes.fromhex(digest), comment)


class Keyring:
    """The keys of one reading of the file."""

    def __init__(self, entries: Iterable[KeyEntry]):
        self._by_id = {entry.key_id: entry for entry in entries}

    def __len__(self) -> int:
        return len(self._by_id)

    def tenant_of(self, key: str) -> str | None:
        """The tenant that `key` belongs to; None for anything that is not one of the keys."""
        match = KEY.fullmatch(key)
        entry = self._by_id.get(match[1]) if match else None
        known = entry.digest if entry is not None else NOBODY
        same = hmac.compare_digest(digest_of(key), known)
        return entry.tenant if entry is not None and same else None


def watch(path: Path) -> Watched[Keyring]:
    """The keyring in `path`, read again when it changes. Raises StartupError when it is none now."""
    return Watched("--api-keys", [path], lambda: Keyring(read(path)))


def read(path: Path) -> list[KeyEntry]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise StartupError(f"cannot read the key file {path}: {reason}") from None
    return parse(text, str(path))


# ---- changes by the operator: in place, because a container sees a single mounted file by its inode ----


def add(path: Path, entry: KeyEntry) -> None:
    """Appends to the file, which is made (readable by its owner only) if it is not there."""
    if path.exists():
        read(path)  # never append to what is no key file
    try:
        path.touch(mode=0o600)
        text = path.read_text("utf-8")
        separator = "" if not text or text.endswith("\n") else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{separator}{entry.line()}\n")
    except OSError as error:
        raise StartupError(f"cannot write the key file {path}: {error.strerror}") from None


def remove(path: Path, key_id: str) -> KeyEntry:
    """Takes one key away; comments and the other lines stay as they are."""
    entry = next((entry for entry in read(path) if entry.key_id == key_id), None)
    if entry is None:
        raise StartupError(f"{path} has no key with the id {key_id}: `stepwire keys list {path}` shows them")
    try:
        with path.open("r+", encoding="utf-8") as file:
            kept = "".join(line for line in file.readlines() if line.split()[:1] != [key_id])
            file.seek(0)
            file.write(kept)
            file.truncate()
    except OSError as error:
        raise StartupError(f"cannot write the key file {path}: {error.strerror}") from None
    return entry

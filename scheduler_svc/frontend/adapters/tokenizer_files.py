"""The tokenizer's files as one zip archive, for a gateway that tokenises itself.

Only files that say how text becomes tokens and back; never weights. Made once, when first asked for.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from scheduler_svc.errors import Unimplemented

CHUNK_BYTES = 64 << 10
MAX_FILE_BYTES = 128 << 20
_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("config.json", "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
# The same files give the same archive.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Archive:
    data: bytes
    sha256: str

    @property
    def chunks(self) -> list[bytes]:
        return [self.data[i : i + CHUNK_BYTES] for i in range(0, len(self.data), CHUNK_BYTES)]


class TokenizerFiles:
    def __init__(self, directory: Path | None):
        self._directory = directory

    @cached_property
    def archive(self) -> Archive:
        """Takes a moment: not for the event loop."""
        if self._directory is None:
            raise Unimplemented("this server has no tokenizer files to give")
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in _NAMES:
                path = self._directory / name
                if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                    entry = zipfile.ZipInfo(name, _EPOCH)
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(entry, path.read_bytes())
        data = buffer.getvalue()
        return Archive(data, hashlib.sha256(data).hexdigest())

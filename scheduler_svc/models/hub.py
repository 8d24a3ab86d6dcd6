"""Models by Hugging Face id, through huggingface_hub and its own cache.

Only weights (safetensors), JSON and tokenizer files are taken: no pickles, no code.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from scheduler_svc.errors import StartupError
from scheduler_svc.models.progress import Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")
FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]


def is_hub_id(spec: str) -> bool:
    return HUB_ID.fullmatch(spec) is not None and ".." not in spec


def fetch_from_hub(spec: str, progress: Progress, files: Sequence[str] = FILES) -> Path:
    """`owner/name` or `owner/name@revision`; of it these files. A snapshot in the cache needs no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = spec.partition("@")
    progress.note(f"looking for {name} on the Hugging Face hub")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(files)))
    except GatedRepoError:
        why = "its licence must be accepted on huggingface.co first; then run `hf auth login`"
    except RepositoryNotFoundError:
        why = "there is no such model on the hub, or it is private (`hf auth login`)"
    except RevisionNotFoundError:
        why = f"it has no revision {revision!r}"
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached and the model is not in the local cache; give a directory instead"
    except HfHubHTTPError as error:
        why = f"the hub answered: {_first_line(error)}"
    except (OSError, ValueError) as error:
        why = _first_line(error)
    raise StartupError(f"cannot get model {spec!r}: {why}")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

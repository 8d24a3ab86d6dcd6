"""What a frontend reads from a model directory: names, defaults, end-of-sequence ids, the chat template's source.

Plain JSON only; weights are never opened. Knows nothing of the executor's geometry, which is the scheduler's to tell.
"""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

# Sampling fields that generation_config.json may give a default for, with what we accept there.
_DEFAULTS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-6, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


@dataclass(frozen=True)
class ModelFiles:
    """One model directory, read once."""

    tokenizer: ModelTokenizer
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str = ""
    # Strings the template may use: bos_token, eos_token and the like.
    special_strings: dict[str, str] = field(default_factory=dict)
    # Of the model's configuration: {} when it has none.
    config: dict[str, Any] = field(default_factory=dict)
    # Where the tokenizer's files are, for those who are handed copies. None: nowhere.
    directory: Path | None = None

    @classmethod
    def load(cls, model_dir: Path) -> "ModelFiles":
        if not model_dir.is_dir():
            raise StartupError(f"{model_dir}: no such model directory; name one with --model")
        tokenizer = ModelTokenizer.load(model_dir)
        generation = _read_json(model_dir / "generation_config.json")
        tokenizer_config = _read_json(model_dir / "tokenizer_config.json")
        config = _read_json(model_dir / "config.json")
        specials = _special_strings(model_dir, tokenizer_config)
        eos = {
            *_ids(config.get("eos_token_id")),
            *_ids(generation.get("eos_token_id")),
            *_ids(tokenizer.token_id(specials["eos_token"]) if "eos_token" in specials else None),
        }
        return cls(
            tokenizer=tokenizer,
            sampling_defaults=_sampling_defaults(generation),
            eos_token_ids=tuple(sorted(eos)),
            chat_template=_chat_template(model_dir, tokenizer_config),
            special_strings=specials,
            config=config,
            directory=model_dir,
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise StartupError(f"{path}: not readable as JSON ({error}); fetch the model again") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path}: not a JSON object; fetch the model again")
    return content


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    defaults = {}
    for name, (low, high) in _DEFAULTS.items():
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            log.warning("generation_config.json: %s=%r is outside %s..%s and is ignored", name, value, low, high)
            continue
        defaults[name] = value
    return defaults


def _chat_template(model_dir: Path, tokenizer_config: dict[str, Any]) -> str:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = _read_json(model_dir / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else ""


def _special_strings(model_dir: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens as strings; the files spell them as strings or as objects with `content`."""
    found = {}
    for source in (_read_json(model_dir / "special_tokens_map.json"), tokenizer_config):
        for name, value in source.items():
            if isinstance(value, dict):
                value = value.get("content")
            if name.endswith("_token") and isinstance(value, str):
                found[name] = value
    return found

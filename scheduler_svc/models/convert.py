"""A GGUF file becomes a normal Hugging Face model directory: JSON files and one model.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler_svc.models.gguf_config import generation_config, model_config
from scheduler_svc.models.gguf_file import GgufFile
from scheduler_svc.models.gguf_tensors import tensor_specs
from scheduler_svc.models.gguf_tokenizer import build_tokenizer
from scheduler_svc.models.manifest import CONVERSION, write_manifest
from scheduler_svc.models.progress import Progress
from scheduler_svc.models.safetensors_io import write_safetensors


def convert_gguf(
    source: Path, directory: Path, progress: Progress, origin: dict[str, Any], *, sampling: Mapping[str, Any] = {}
) -> None:
    """Fills the empty `directory`. Everything is checked before the first byte of weights is written.

    `sampling`: the model's defaults, which a GGUF file does not hold.
    """
    with GgufFile(source) as file:
        config = model_config(file)
        generation = generation_config(file) | dict(sampling)
        specs = tensor_specs(file, config)
        tokenizer, tokenizer_config = build_tokenizer(file)
        _write_json(directory / "config.json", config)
        _write_json(directory / "generation_config.json", generation)
        _write_json(directory / "tokenizer_config.json", tokenizer_config)
        tokenizer.save(str(directory / "tokenizer.json"))
        total = sum(spec.num_bytes for spec in specs)
        with progress.task(f"converting {source.name}", total) as advance:
            weights = write_safetensors(directory / "model.safetensors", specs, advance)
    write_manifest(directory, origin | {"conversion": CONVERSION}, known={"model.safetensors": weights})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""The methods by the name that `quantization_config` gives them; each is imported where a model is stored in it."""

from importlib import import_module
from typing import Any

from executor_svc.errors import StartupError
from executor_svc.model.quantised.method import Method, Settings

# Module of this package, and the class in it.
METHODS = {
    "awq": ("awq", "Awq"),
    "gptq": ("gptq", "Gptq"),
    "compressed-tensors": ("compressed", "CompressedTensors"),
    "fp8": ("fp8", "Fp8"),
    "fbgemm_fp8": ("fp8", "Fp8"),
}


def read_method(raw: Any, source: str) -> Method | None:
    """The method of a config.json's `quantization_config`, None where it is None; StartupError names what is amiss."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise StartupError(f"{source}: quantization_config is {raw!r}; it must be an object")
    name = raw.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise StartupError(
            f"{source}: quantization_config with quant_method {name!r} is not supported; "
            f"supported: {', '.join(METHODS)}"
        )
    module, kind = METHODS[name]
    return getattr(import_module(f"executor_svc.model.quantised.{module}"), kind).read(Settings(name, raw, source))

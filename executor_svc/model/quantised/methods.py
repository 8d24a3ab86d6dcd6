"""The methods by the name that `quantization_config` gives them."""

from collections.abc import Callable
from typing import Any

from executor_svc.errors import StartupError
from executor_svc.model.quantised.awq import Awq
from executor_svc.model.quantised.compressed import CompressedTensors
from executor_svc.model.quantised.fp8 import Fp8
from executor_svc.model.quantised.gptq import Gptq
from executor_svc.model.quantised.method import Method, Settings

METHODS: dict[str, Callable[[Settings], Method]] = {
    "awq": Awq.read,
    "gptq": Gptq.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": Fp8.read,
    "fbgemm_fp8": Fp8.read,
}


def read_method(raw: Any, source: str) -> Method | None:
    """The method of a config.json's `quantization_config`, None where it is None; StartupError names what is amiss."""
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise StartupError(f"{source}: quantization_config is {raw!r}; it must be an object")
    name = raw.get("quant_method")
    if name not in METHODS:
        raise StartupError(
            f"{source}: quantization_config with quant_method {name!r} is not supported; "
            f"supported: {', '.join(METHODS)}"
        )
    return METHODS[name](Settings(name, raw, source))

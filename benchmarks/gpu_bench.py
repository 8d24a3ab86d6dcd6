"""Where a GPU benchmark's rows go, and how it takes time."""

import platform
from collections.abc import Callable

import torch
import triton


class Bench:
    """A dry run makes each call once, on the CPU, and takes no time."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        # The bare interpreter cannot compute bfloat16.
        self.dtype = torch.float16 if dry else torch.bfloat16
        self.rows: list[dict] = []
        self.copy_rate = self.matmul_rate = float("nan")
        torch.manual_seed(0)

    def machine(self) -> dict[str, str]:
        device = "interpreter" if self.dry else torch.cuda.get_device_name()
        return {"device": device, "torch": torch.__version__, "triton": triton.__version__, "host": platform.machine()}

    def add(self, section: str, what: str, **figures: object) -> None:
        self.rows.append({"section": section, "what": what, **figures})

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of one call; nan in a dry run, where it is made once."""
        if self.dry:
            call()
            return float("nan")
        return triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median") / 1e3

    def pick(self, real: list, dry: list) -> list:
        return dry if self.dry else real

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

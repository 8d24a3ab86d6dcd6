"""Where a GPU benchmark's rows go, and how it takes time."""

import gc
import math
import platform
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import triton

Case = TypeVar("Case")


class Bench:
    """A dry run makes each call once, on the CPU, and takes no time. A section has a budget of seconds: what it has not
    begun by then is left out, and a row says so."""

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        self.device = "cpu" if dry else "cuda"
        # The bare interpreter cannot compute bfloat16.
        self.dtype = torch.float16 if dry else torch.bfloat16
        self.rows: list[dict] = []
        self.copy_rate = self.matmul_rate = float("nan")
        self._section, self._until = "", math.inf
        torch.manual_seed(0)
        if dry:  # threads that wait for each other at tiny sizes, on a machine with other work
            torch.set_num_threads(1)

    def begin(self, section: str, budget_s: float) -> None:
        """Also gives back what the section before it left on the device."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()
        self._section, self._until = section, math.inf if self.dry else time.perf_counter() + budget_s

    def within(self, cases: list[Case]) -> Iterator[Case]:
        """Those that the section's time allows to begin."""
        for index, case in enumerate(cases):
            if time.perf_counter() > self._until:
                self.add(self._section, "out of time", left_out=str(cases[index:]))
                return
            yield case

    def synchronise(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def figure(self, value: float, digits: int = 1) -> float | None:
        """For a row; None where a dry run has nothing to say."""
        return None if self.dry or math.isnan(value) else round(value, digits)

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

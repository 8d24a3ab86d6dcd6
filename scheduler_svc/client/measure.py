"""What happened to each request, and the numbers that the field reports about it. Pure: times come in, figures go out.

TTFT   from the moment the request was due to its first token; in an open loop waiting for a free client counts too
ITL    gap between two messages of a stream, as a reader sees it (a message may carry several tokens)
TPOT   (last token - first token) / (tokens - 1) of a request
E2E    from due to the last token
goodput   requests a second that met every objective; refused and failed ones are misses
offered   requests over the seconds in which they came due; in a closed loop there is no such thing

Rates of what is served are over the whole run, up to the last end.
"""

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from scheduler_svc.errors import StartupError

QUANTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "itl", "tpot", "e2e")


@dataclass(slots=True)
class Record:
    """Times in seconds since the start of the run. `error`: a gRPC status name, empty when the stream ended well."""

    due_s: float
    num_prompt: int
    num_asked: int
    message_s: list[float] = field(default_factory=list)
    num_output: int = 0
    num_cached: int = 0
    end_s: float = 0.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.message_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.message_s[-1] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.message_s)]

    @property
    def tpot_s(self) -> float:
        return (self.message_s[-1] - self.message_s[0]) / max(1, self.num_output - 1)

    @property
    def is_whole(self) -> bool:
        return not self.error and bool(self.message_s)


def parse_slo(text: str) -> dict[str, float]:
    """ "ttft:200ms itl:50 e2e:2s": milliseconds without a unit; the limits in milliseconds.

    `itl` is judged by the 99th percentile of a request's own gaps.
    """
    limits = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        number, scale = (value[:-2], 1) if value.endswith("ms") else (value.removesuffix("s"), 1000)
        if number == value:
            scale = 1
        try:
            limits[name] = float(number) * scale
        except ValueError:
            limits[name] = -1.0
        if name not in OBJECTIVES or not 0 < limits[name] < float("inf"):
            raise StartupError(
                f"--slo {part!r}: write NAME:TIME, as in ttft:200ms or e2e:2s, with a name of {', '.join(OBJECTIVES)}"
            )
    return limits


def meets(record: Record, slo: dict[str, float]) -> bool:
    if not record.is_whole:
        return False
    reached = {
        "ttft": record.ttft_s,
        "tpot": record.tpot_s,
        "e2e": record.e2e_s,
        "itl": float(np.percentile(record.gaps_s, 99)) if record.gaps_s else 0.0,
    }
    return all(reached[name] * 1000 <= limit for name, limit in slo.items())


def summarise(records: list[Record], slo: dict[str, float], *, is_open: bool = False) -> dict[str, Any]:
    """`is_open`: requests came at times of their own."""
    whole = [record for record in records if record.is_whole]
    duration = max((record.end_s for record in records), default=0.0) or float("nan")
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    num_output = sum(record.num_output for record in records)
    summary: dict[str, Any] = {
        "num_requests": len(records),
        "num_whole": len(whole),
        "errors": errors,
        "duration_s": duration,
        "requests_per_s": len(whole) / duration,
        "output_tokens": num_output,
        "output_tokens_per_s": num_output / duration,
        "prompt_tokens": sum(record.num_prompt for record in records),
        "prompt_tokens_per_s": sum(record.num_prompt for record in whole) / duration,
        "cached_tokens": sum(record.num_cached for record in records),
        "tokens_per_message": num_output / max(1, sum(len(record.message_s) for record in records)),
        "ttft_ms": quantiles([record.ttft_s for record in whole]),
        "itl_ms": quantiles([gap for record in whole for gap in record.gaps_s]),
        "tpot_ms": quantiles([record.tpot_s for record in whole if record.num_output > 1]),
        "e2e_ms": quantiles([record.e2e_s for record in whole]),
    }
    arrivals_s = max((record.due_s for record in records), default=0.0)
    if is_open and arrivals_s > 0:
        summary["arrivals_s"] = arrivals_s
        summary["offered_per_s"] = len(records) / arrivals_s
    if slo:
        summary["slo_ms"] = slo
        summary["goodput_per_s"] = sum(meets(record, slo) for record in records) / duration
        summary["slo_met"] = sum(meets(record, slo) for record in records) / max(1, len(records))
    return summary


def quantiles(values_s: list[float]) -> dict[str, float] | None:
    """Milliseconds; None when nothing was measured."""
    if not values_s:
        return None
    points = np.percentile(values_s, QUANTILES) * 1000
    return {"mean": float(np.mean(values_s)) * 1000} | {
        f"p{q}": float(p) for q, p in zip(QUANTILES, points, strict=True)
    }


def as_row(record: Record) -> dict[str, Any]:
    """For the JSON file: enough to draw any picture later."""
    row = asdict(record)
    row["message_s"] = [round(value, 6) for value in record.message_s]
    return row

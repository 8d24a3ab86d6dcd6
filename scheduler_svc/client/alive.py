"""Does a process answer on its metrics port? Liveness, for containers of services that speak no gRPC."""

import http.client
import urllib.error
import urllib.request

from scheduler_svc.errors import StartupError


def answers_metrics(address: str, timeout_s: float) -> str:
    """ "ALIVE"; raises StartupError when HOST:PORT does not answer with metrics in time."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as reply:
            found = any(line.startswith(b"stepwire_") for line in reply)
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError) as error:
        raise StartupError(f"{address} does not answer: {getattr(error, 'reason', error)}") from None
    if not found:
        raise StartupError(f"{address} answers, but with nobody's metrics that we know")
    return "ALIVE"

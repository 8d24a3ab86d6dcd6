"""Which variables with our prefix are known. Reads no environment itself: config modules hand theirs in."""

import difflib
from collections.abc import Iterable, Mapping

from scheduler_svc.errors import StartupError

PREFIX = "STEPWIRE_"


def refuse_unknown(known: Iterable[str], environ: Mapping[str, str]) -> None:
    """A variable with our prefix that no option of ours reads is a mistake: better now than unnoticed."""
    names = sorted(known)
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in names:
            close = difflib.get_close_matches(variable, names, n=1)
            hint = f"did you mean {close[0]}?" if close else "unset it (`stepwire serve --help` lists the options)"
            raise StartupError(f"unknown environment variable {variable}: {hint}")

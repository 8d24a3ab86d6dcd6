"""How a service's command line begins and ends: a fault at the start, however it was found, is one line and status 1;
a bug is one line and status 70.

Knows nothing of the services. A supervisor shows that line as the reason why nothing runs.
"""

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import typer

from scheduler_svc.errors import StartupError

logger = logging.getLogger(__name__)

# sysexits' EX_SOFTWARE: a bug, worth a restart.
EXIT_BROKEN = 70
# The root of every complaint about the command line, whether typer brings its own click or uses the installed one.
UsageError: Any = typer.BadParameter.__base__


def run(app: typer.Typer, name: str, arguments: list[str] | None = None) -> int:
    """The exit status of `app`, a single command."""
    try:
        return typer.main.get_command(app).main(arguments, prog_name=name, standalone_mode=False) or 0
    except StartupError as error:
        reason = str(error)
    except UsageError as error:
        reason = error.format_message()
    except Exception as error:
        # The message may hold what a user sent: its place is in the debug log alone.
        where = traceback.extract_tb(error.__traceback__)[-1]
        logger.critical("failed error=%s at=%s:%s", type(error).__name__, Path(where.filename).name, where.lineno)
        logger.debug("where", exc_info=True)
        return EXIT_BROKEN
    print(f"stepwire: {reason}", file=sys.stderr)
    return 1

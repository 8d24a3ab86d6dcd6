"""`stepwire serve` with fake children: `python -m tests.unit.supervisor.fake_serve KINDS SERVE_OPTION=VALUE...`.

KINDS is "scheduler=good,executor=deaf,..."; a part that is not named is good.
"""

import sys
from pathlib import Path

from scheduler_svc.errors import StartupError
from scheduler_svc.supervisor.config import read_serve_config
from scheduler_svc.supervisor.model import ResolvedModel
from scheduler_svc.supervisor.serve import run

CHILD = Path(__file__).with_name("fake_child.py")


def main() -> int:
    kinds = dict(pair.split("=") for pair in sys.argv[1].split(",") if pair)
    arguments = dict(pair.split("=") for pair in sys.argv[2:])
    try:
        return run(
            read_serve_config(arguments),
            resolve=lambda spec, console: ResolvedModel("fake", Path("/models/fake")),
            launch=lambda part: [sys.executable, "-S", str(CHILD), kinds.get(part, "good")],
        )
    except StartupError as error:
        print(f"stepwire: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m tests.chaos --seconds 60 --seed 1 [--standby]`: one run; its figures, or the whole story when it fails."""

import argparse
import random
import tempfile
from pathlib import Path

from scheduler_svc.models.store import resolve_model
from tests.chaos.chaos import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kills", type=int, default=0, help="go on until there were so many")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--fault-every", type=float, default=0.5, help="seconds, on average")
    parser.add_argument("--standby", action="store_true", help="with a second executor, a victim like the others")
    parser.add_argument("--story", action="store_true", help="what was done when, and the log, also of a good run")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    plan = Plan(args.seconds, seed, args.streams, args.frontends, args.standby, args.kills, args.fault_every)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(plan, Path(folder), resolve_model(""))
        print(outcome.report())
        if args.story:
            print("\n".join(outcome.story))
        if not outcome.is_good or args.story:
            print((Path(folder) / "serve.log").read_text(errors="replace")[-6000:])
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())

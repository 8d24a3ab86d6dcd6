"""`python -m tests.sim --seeds 100000`: as many worlds as there is time for. Prints each failing seed and its story."""

import argparse
import sys
import time
import traceback
from collections import Counter

from tests.sim.witness import SOMETIMES
from tests.sim.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulates the scheduler core in many small worlds.")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--coverage", action="store_true", help="print how often each rare event happened")
    arguments = parser.parse_args()
    seen: Counter[str] = Counter()
    failed: list[int] = []
    start = time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        world = World(seed)
        try:
            world.run()
        except AssertionError:
            traceback.print_exc(limit=-4)
            print(f"seed {seed} failed; python -m tests.sim --first {seed} --seeds 1", file=sys.stderr)
            failed.append(seed)
            if len(failed) == 5:
                break
        seen.update(world.seen)
    if arguments.coverage:
        for name, count in sorted(seen.items()):
            print(f"{count:8d}  {name}")
    never = [name for name in SOMETIMES if not seen[name]]
    if never and arguments.seeds >= 1000:
        print(f"never happened: {', '.join(never)}", file=sys.stderr)
    print(f"{arguments.seeds} worlds, {len(failed)} failed {failed or ''}, {time.perf_counter() - start:.1f} s")
    return 1 if failed or (never and arguments.seeds >= 1000) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Stands for a service: becomes ready, prints, obeys SIGTERM, or misbehaves as its first argument says.

    good            ready at once, ends with 0 on SIGTERM
    refuse          says why it cannot start and ends with 1
    crash           ends with a traceback before it is ready
    once            good in its first life, `refuse` in the next ones (a marker beside the ready file tells)
    flaky           kills itself before it is ready, in its first life only
    silent          never ready, ends on SIGTERM
    deaf            ready, ignores SIGTERM
    slow            ready, ends with 0 half a second after SIGTERM
    streaming       ready, ends with 0 at the second SIGTERM
    pulsing         good, and renews its ready file
Other arguments are those that serve gives to every child.
"""

import itertools
import json
import os
import signal
import sys
import threading
from pathlib import Path


def main() -> int:
    kind, arguments = sys.argv[1], sys.argv[2:]
    options = dict(itertools.pairwise(arguments))
    ready_file = Path(options["--ready-file"])
    marker = ready_file.with_suffix(".lived")
    first_life = not marker.exists()
    marker.touch()
    if kind == "refuse" or (kind == "once" and not first_life):
        print("stepwire: the weights are made of cheese: bring others", file=sys.stderr)
        return 1
    if kind == "crash":
        raise RuntimeError("a bug")
    if kind == "flaky" and first_life:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "silent":
        print("still loading", flush=True)
        signal.pause()
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if kind == "deaf" else asked.set())
    report = {"pid": os.getpid(), "grpc": f"127.0.0.1:{int(options.get('--port', 0)) or 40000 + os.getpid() % 9999}"}
    report |= {"pulse": True} if kind == "pulsing" else {}
    partial = ready_file.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    partial.replace(ready_file)
    print(f"arguments {' '.join(arguments)}")
    print("variables", *sorted(name for name in os.environ if name.startswith(("STEPWIRE_", "PROMETHEUS_"))))
    print("2026-01-01 00:00:00,000 INFO fake routine", file=sys.stderr, flush=True)
    print("2026-01-01 00:00:00,000 WARNING fake trouble", file=sys.stderr, flush=True)
    print("said it all", flush=True)
    while not asked.wait(0.2 if kind == "pulsing" else None):
        os.utime(ready_file)
    if kind == "streaming":
        asked.clear()
        asked.wait()
        print("asked twice")
    print("WARNING parting", file=sys.stderr)
    if kind == "slow":
        threading.Event().wait(0.5)
    print("bye")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

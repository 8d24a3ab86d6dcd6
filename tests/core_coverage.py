"""`python -m tests.core_coverage`: runs what tests the core and fails unless every branch of it was taken."""

import subprocess
import sys

WHAT_TESTS_IT = ("tests/unit/core", "tests/property", "tests/sim/test_world.py", "tests/sim/test_traces.py")


def main() -> int:
    run = (sys.executable, "-m", "coverage")
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *WHAT_TESTS_IT)
    measured = subprocess.run((*run, "run", "--branch", "--source=scheduler_svc.core", *tests), check=False)
    report = subprocess.run((*run, "report", "--show-missing", "--skip-covered", "--fail-under=100"), check=False)
    return measured.returncode or report.returncode


if __name__ == "__main__":
    sys.exit(main())

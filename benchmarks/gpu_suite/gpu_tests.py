"""Runs tests/gpu so that no test costs the others: python -m benchmarks.gpu_suite.gpu_tests [PYTEST OPTIONS].

Runs that folder only: collecting all tests takes most of a minute, and one that cannot be collected would end them all.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from benchmarks.commands import ROOT

_SECONDS_PER_TEST = 60


def command(options: list[str]) -> list[str]:
    """Returns pytest's command line with the installed plugins."""
    words = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "--no-header", "-p", "no:cacheprovider"]
    if find_spec("xdist") is not None:  # replaces a worker that hangs or dies and goes on with the next tests
        words += ["-n", "1", "--max-worker-restart", "8"]
    if find_spec("pytest_timeout") is not None:
        words += ["--timeout", str(_SECONDS_PER_TEST), "--timeout-method", "thread"]
    # Before that, prints the stacks of all threads: what a worker prints as it dies is lost.
    words += ["-o", f"faulthandler_timeout={0.8 * _SECONDS_PER_TEST:g}", "-o", "faulthandler_exit_on_timeout=true"]
    return [*words, "--durations=0", *options]


def main() -> None:
    words = command(sys.argv[1:])
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execv(words[0], words)


if __name__ == "__main__":
    main()

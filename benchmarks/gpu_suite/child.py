"""Measures in a process of its own: python -m benchmarks.gpu_suite.child WHAT ARGUMENTS-AS-JSON RESULT-PATH.

Exits with 1 if the result says that something is wrong, and writes the result nevertheless.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# Before torch is loaded: spinning threads would take the processors of worker threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Module and function of each measurement; those of training take a row.
_OF_ROWS = {
    "train": ("training", "measure"),
    "published": ("training", "measure"),
    "trainer": ("trainer_rows", "measure_trainer"),
}
_OTHERS = {
    "races": ("races", "run_races"),
    "smoke": ("smoke", "run_smoke"),
    "link": ("machine_rows", "measure_link"),
    "adam": ("machine_rows", "measure_adam"),
    "deepspeed kernel": ("machine_rows", "compile_deepspeed_kernel"),
}


def run(what: str, values: dict[str, Any]) -> dict[str, Any]:
    module, function = {**_OF_ROWS, **_OTHERS}[what]
    measure = getattr(import_module(f"benchmarks.gpu_suite.{module}"), function)
    if what not in _OF_ROWS:
        found: dict[str, Any] = measure(**values)
        return found
    from benchmarks.gpu_suite.settings import TrainRow

    found = measure(TrainRow.from_json(values))
    return found


def main() -> int:
    what, values, path = sys.argv[1:]
    found = run(what, json.loads(values))
    if os.environ.get("RANK", "0") == "0":
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    for wrong in found.get("wrong", []):
        print(f"wrong: {wrong}")
    # Threads and processes of the measured packages must not keep this one from ending.
    sys.stdout.flush()
    os._exit(1 if found.get("wrong") else 0)


if __name__ == "__main__":
    main()

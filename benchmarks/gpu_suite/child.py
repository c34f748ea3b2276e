"""Measures in a process of its own: python -m benchmarks.gpu_suite.child WHAT ARGUMENTS-AS-JSON RESULT-PATH.

Exits with 1 if the result says that something is wrong, and writes the result nevertheless.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# Before torch is loaded: spinning threads would take the processors of worker threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run(what: str, values: dict[str, Any]) -> dict[str, Any]:
    if what == "train":
        from benchmarks.gpu_suite.settings import TrainRow
        from benchmarks.gpu_suite.training import measure

        return measure(TrainRow.from_json(values))
    if what == "races":
        from benchmarks.gpu_suite.races import run_races

        return run_races(**values)
    if what in ("smoke", "sanitized"):
        from benchmarks.gpu_suite import smoke

        return smoke.run_smoke(**values) if what == "smoke" else smoke.run_sanitized(**values)
    if what == "trainer":
        from benchmarks.gpu_suite.settings import TrainRow
        from benchmarks.gpu_suite.trainer_rows import measure_trainer

        return measure_trainer(TrainRow.from_json(values))
    from benchmarks.gpu_suite import machine_rows

    measurements: dict[str, Any] = {
        "link": machine_rows.measure_link,
        "adam": machine_rows.measure_adam,
        "deepspeed kernel": machine_rows.compile_deepspeed_kernel,
    }
    found: dict[str, Any] = measurements[what](**values)
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

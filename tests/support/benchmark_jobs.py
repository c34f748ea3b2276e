"""Jobs of a benchmark that write down when they run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.jobs import (
    RESULT_PATH,
    Job,
    Results,
    run_jobs,
)

# Appends its name to a file, so that it shows how often it ran, and writes a result.
SCRIPT = """
import json, os, sys, time
name, log, path, seconds = sys.argv[1:]
with open(log, "a") as file:
    file.write(name + "\\n")
time.sleep(float(seconds))
print("measuring", name)
if name == "bad":
    print("the first of many lines\\n" + 1000 * "another line\\n")
    sys.exit("something is wrong")
if name == "chatty":
    print("the first line\\n" + 200_000 * "another line\\n" + "the last line")
if name == "not a number":
    json.dump({"loss": float("nan"), "losses": [1.0, float("-inf")], "median": 2.5}, open(path, "w"))
    sys.exit()
if name != "silent":
    json.dump({"name": name, "variable": os.environ.get("A_VARIABLE")}, open(path, "w"))
"""


class Bench:
    """Jobs that write down when they run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "out", folder / "log"
        self.said: list[str] = []

    def job(self, name: str, *, seconds: float = 30.0, takes: float = 0.0, **more: Any) -> Job:
        command = [sys.executable, "-c", SCRIPT, name, str(self.log), RESULT_PATH, str(takes)]
        settings: Mapping[str, Any] = more.pop("settings", {"name": name})
        return Job(name, command, settings, seconds, **more)

    def run(self, *jobs: Job, limit: float = 60.0, **options: Any) -> list[str]:
        left = run_jobs(jobs, self.results(), limit, self.said.append, **options)
        return [job.key for job in left]

    def results(self) -> Results:
        return Results(self.folder, "merged.json")

    def report(self, *jobs: Job) -> dict[str, Any]:
        return self.results().merge(jobs, {"command": ["test"]})

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

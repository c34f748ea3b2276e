"""Runs measurements as a list of processes, one after the other; the next call continues one that was cut short.

After every job it writes all results to one JSON file, and it logs a job's output as the job prints it: a kill at any
moment loses no more than the running job. It does not repeat a job that is in the file with the same settings and
sources.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.report import PACKAGE, digest_of, facts, write_results
from superoffload.tools.output import naming_write_errors

Row = dict[str, Any]

DONE, FAILED, TIMED_OUT, NOT_HERE = "done", "failed", "timed out", "not here"
ENDS_VARIABLE = "BENCHMARK_JOB_ENDS"  # in a job's environment: when it is ended, by the monotonic clock

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PYTHON = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}  # a job's output survives its end by a signal
_PR_SET_PDEATHSIG = 1
_KEPT_OUTPUT = 200_000  # characters of a job's output in its row; the log has all of it
_LOGGED = 512 << 10  # bytes at the start and at the end of one job's output, if it prints more than both
_ABORTING_SECONDS = 5.0  # between SIGABRT, which makes Python print its threads' stacks, and SIGKILL


@dataclass(frozen=True)
class Job:
    """Describes one measurement: child.py's ``what`` with ``values``, which are its settings too."""

    key: str
    what: str
    values: Mapping[str, Any]
    seconds: float = 180.0  # at most
    needs: float = 60.0  # seconds that a call must have left to begin it
    absent: str | None = None  # why it cannot be measured here
    sources: tuple[str, ...] = PACKAGE  # files that decide its result
    after: tuple[str, ...] = ()  # keys of jobs that must succeed first
    prepares: bool = False  # prepares later jobs: runs again on every machine, and after every failure
    keeps_output: bool = False  # its output is part of the result
    starts: Sequence[str] = (sys.executable,)  # what starts child.py
    command: Sequence[str] = ()  # instead of child.py; it writes no result

    @property
    def settings(self) -> Row:
        return {"what": self.what, **self.values}


class Results:
    """Owns one file, with a row for each job that has ended, and a log beside it.

    ``earlier``: such a file of another folder or machine, whose rows count here too. Rows that this call does not ask
    for stay in the file.
    """

    def __init__(self, path: Path, earlier: Path | None = None) -> None:
        self.path, self.log = path, path.with_suffix(".log")
        self._header = {**facts(), "limit": None}
        self._rows: dict[str, Row] = {}
        for each in filter(None, (earlier, path)):
            self._rows.update({row["key"]: row for row in (_read(each) or {}).get("rows", [])})

    def latest(self, job: Job) -> Row | None:
        """Returns the latest result with these sources and settings, from here or elsewhere, good or bad."""
        row = self._rows.get(job.key)
        if row is None or row.get("sources") != digest_of(job.sources) or row.get("settings") != plain(job.settings):
            return None
        return row

    def row(self, job: Job) -> Row | None:
        """Returns the same if it still counts, so that the job need not run again."""
        row = self.latest(job)
        if row is not None and row["status"] == NOT_HERE and job.absent != row["error"]:
            return None  # it may be possible by now
        if row is not None and job.prepares and (row["status"] != DONE or row.get("boot") != boot()):
            return None
        return row

    def add(self, job: Job, status: str, seconds: float, **found: Any) -> None:
        row = {"key": job.key, "status": status, "settings": job.settings, "sources": digest_of(job.sources)}
        row |= {"made_from": job.sources, "commit": self._header["commit"], "boot": boot()}
        self._rows[job.key] = plain({**row, "wall_seconds": round(seconds, 3), **found})
        self.write({})

    def rows(self, jobs: Iterable[Job]) -> list[Row]:
        """Returns the results so far, in the order of ``jobs``."""
        return [row for job in jobs if (row := self.latest(job)) is not None]

    def merge(self, jobs: Iterable[Job], extra: Mapping[str, Any]) -> None:
        """Writes one report of all results so far, in the order of ``jobs``, followed by the rows of other jobs."""
        self._rows = {**{row["key"]: row for row in self.rows(jobs)}, **self._rows}
        self.write(extra)

    def write(self, extra: Mapping[str, Any]) -> None:
        write_results(self.path, plain({**self._header, **extra, "rows": list(self._rows.values())}))


def run_jobs(
    jobs: Sequence[Job], results: Results, time_limit: float, *, retry: bool, environment: Mapping[str, str]
) -> list[Job]:
    """Runs what has no result yet for at most ``time_limit`` seconds; returns the jobs that are left, in order.

    It does not begin a job with less time left than that needs; a later one that needs less may run. ``retry``: jobs
    that failed or took too long in an earlier call run again.
    """
    deadline = time.monotonic() + time_limit
    ended = {job.key for job in jobs if results.row(job) is not None}
    if retry:
        ended -= {row["key"] for row in results.rows(jobs) if row["status"] in (FAILED, TIMED_OUT)}
    wanted: set[str] = set()  # of the preparations, those for what this call would run
    for job in reversed(jobs):
        if job.absent is None and (job.key in wanted if job.prepares else job.key not in ended):
            wanted.update(job.after)
    left: list[Job] = []
    for number, job in enumerate(jobs, 1):
        if job.key in ended or (job.prepares and job.key not in wanted):
            continue
        if job.absent is not None:
            results.add(job, NOT_HERE, 0.0, error=job.absent)
            continue
        remaining = deadline - time.monotonic()
        if remaining < min(job.needs, job.seconds) or unmet(job, jobs, results):
            left.append(job)
            continue
        print(f"[{number}/{len(jobs)}] {job.key}", flush=True)
        if not _run(job, results, remaining, environment):
            left.append(job)
    return left


def unmet(job: Job, jobs: Sequence[Job], results: Results) -> list[str]:
    """Returns keys of jobs that ``job`` comes after and that have not succeeded."""
    by_key = {other.key: other for other in jobs}
    return [key for key in job.after if (row := results.row(by_key[key])) is None or row["status"] != DONE]


def _run(job: Job, results: Results, remaining: float, shared: Mapping[str, str]) -> bool:
    """Runs a job; returns False if the call's time was over before the job's own."""
    seconds, began = min(job.seconds, remaining), time.monotonic()
    environment = {**os.environ, **_PYTHON, **shared, ENDS_VARIABLE: str(began + seconds)}
    with tempfile.TemporaryDirectory(prefix="superoffload-job-") as scratch, naming_write_errors(results.log):
        path = Path(scratch, "result.json")
        child = ["-m", "benchmarks.gpu_suite.child", job.what, json.dumps(job.values), str(path)]
        status, output = _logged(job.key, job.command or [*job.starts, *child], environment, results.log, seconds)
        found = _read(path)
    took, kept = time.monotonic() - began, {"output": output[-_KEPT_OUTPUT:]}
    if status is None and seconds < job.seconds:
        return False
    if status is None:
        results.add(job, TIMED_OUT, took, error=f"not ended within {job.seconds:g} s", **kept)
    elif status != 0 or (found is None and not job.command):
        why = f"exit status {status}" if status else "it wrote no result"
        last = ([line.strip() for line in output.splitlines() if line.strip()] or ["it printed nothing"])[-1]
        partly = {"result": found} if found is not None else {}  # a failed check still has its figures
        results.add(job, FAILED, took, error=f"{why}: {last[:300]}", **kept, **partly)
    else:
        results.add(job, DONE, took, result=found, **(kept if job.keeps_output else {}))
    return True


def _logged(
    key: str, command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> tuple[int | None, str]:
    """Returns exit status (None: it was ended after this many seconds) and output, which is in the log too."""
    with log.open("a+b") as file:
        file.write(f"\n===== {key} (at most {seconds:.0f} s) at {time.strftime('%H:%M:%S')}\n".encode())
        file.flush()
        start = file.tell()
        status = _ended(command, environment, file, seconds)
        file.seek(start)
        printed = file.read()
        if len(printed) > 2 * _LOGGED:
            printed = printed[:_LOGGED] + b"\n[the middle was cut out here]\n" + printed[-_LOGGED:]
            file.truncate(start)
            file.write(printed)
        return status, printed.decode(errors="replace")


def _ended(command: Sequence[str], environment: Mapping[str, str], output: Any, seconds: float) -> int | None:
    process = subprocess.Popen(
        command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )  # fmt: skip
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # Python's fault handler prints the stack of every thread, also of one that holds the interpreter's lock.
        os.killpg(process.pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ABORTING_SECONDS)
        return None
    finally:
        with suppress(ProcessLookupError):  # with all it has started: it has its own process group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_libc = ctypes.CDLL(None)  # before any fork: a forked process only calls it


def _die_with_parent() -> None:
    """Ends this process with its parent, so that a killed parent leaves no measurement that disturbs the next one."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def boot() -> str:
    """Returns an identity of this boot of this machine, from the system and from a file of ours."""
    mark = Path(tempfile.gettempdir(), "superoffload-this-machine")
    with suppress(FileExistsError), mark.open("x") as file:
        file.write(uuid.uuid4().hex)
    return f"{mark.read_text()}-{_BOOT.read_text().strip() if _BOOT.exists() else ''}"


def plain(values: Any) -> Any:
    """Returns values as JSON gives them back; NaN and infinities, which it lacks, become None."""
    if isinstance(values, Mapping):
        return {str(name): plain(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [plain(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _read(path: Path) -> Any:
    try:
        return plain(json.loads(path.read_bytes()))
    except (OSError, ValueError):  # absent, or cut short
        return None

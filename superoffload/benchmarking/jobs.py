"""Measurements as a list of processes, one after the other: a call that was cut short is continued by the next one.

Every job leaves one JSON file in the results folder once it has ended, well or badly, and all of them are merged into
one. A job whose file is there, with the same settings and of the same commit, is not run again.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from superoffload.benchmarking.facts import benchmark_machine_facts, commit
from superoffload.errors import ArgumentError
from superoffload.reporting.machine import version_facts
from superoffload.reporting.run_folder import naming_write_errors

Row = dict[str, Any]
Progress = Callable[[str], None]

DONE, FAILED, TIMED_OUT, NOT_HERE = "done", "failed", "timed out", "not here"
LEFT = 3  # exit status
RESULT_PATH = "{result}"  # in a command: where it has to write its JSON

_PR_SET_PDEATHSIG = 1
_KEPT_OUTPUT, _SHOWN_OUTPUT = 20_000, 1200  # characters of what a job has said: one that keeps it, one that failed
_LEAST_SECONDS = 5.0  # a job that would have less is left to the next call


@dataclass(frozen=True)
class Job:
    """One measurement. ``settings``: what its result depends on besides the machine and the commit."""

    key: str
    command: Sequence[str]
    settings: Mapping[str, Any]
    seconds: float = 180.0  # at most
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: str | None = None  # why it cannot be measured here
    continues: bool = False  # exits with LEFT where it has more to do in another call
    accepts: tuple[int, ...] = (0,)  # exit statuses with which there is a result
    keeps_output: bool = False  # what it prints is part of the result: a table, what tests say


class Results:
    """The folder: ``rows/KEY.json`` for each job, and all of them in ``NAME``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.merged = folder, folder / name
        self._rows = folder / "rows"
        self._commit = commit()
        with naming_write_errors(folder):
            self._rows.mkdir(parents=True, exist_ok=True)
        self._earlier = {row["key"]: row for row in _rows_of(_read(self.merged))}

    def row(self, job: Job) -> Row | None:
        """What an earlier call has found out, where it still counts."""
        row = _read(self._path(job.key)) or self._earlier.get(job.key)
        if row is None or row.get("commit") != self._commit or row.get("settings") != _plain(job.settings):
            return None
        if row["status"] == NOT_HERE and job.absent != row["error"]:
            return None  # it may be possible by now
        return row

    def add(self, job: Job, status: str, seconds: float, **found: Any) -> Row:
        row = {
            "key": job.key,
            "status": status,
            "settings": _plain(job.settings),
            "commit": self._commit,
            "wall_seconds": round(seconds, 3),
            **found,
        }
        _write(self._path(job.key), row)
        return row

    def forget(self, job: Job) -> None:
        self._path(job.key).unlink(missing_ok=True)
        self._earlier.pop(job.key, None)

    def rows(self, jobs: Iterable[Job]) -> list[Row]:
        """What has been found so far, in the order of ``jobs``."""
        return [row for job in jobs if (row := self.row(job)) is not None]

    def merge(self, jobs: Iterable[Job], extra: Mapping[str, Any]) -> dict[str, Any]:
        """One report of everything found so far, in the order of ``jobs``; written whole or not at all."""
        report = {
            "machine": benchmark_machine_facts(),
            "versions": version_facts(),
            "commit": self._commit,
            "limit": None,
            **extra,
            "rows": self.rows(jobs),
        }
        _write(self.merged, report)
        return report

    def _path(self, key: str) -> Path:
        return self._rows / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', key)}.json"


def run_jobs(
    jobs: Sequence[Job], results: Results, time_limit: float, progress: Progress, *, retry: bool = False
) -> list[Job]:
    """Runs what has no result yet for at most ``time_limit`` seconds; returns the jobs that are left.

    ``retry``: jobs that failed or took too long in an earlier call are tried again.
    """
    check_keys(jobs)
    deadline = time.monotonic() + time_limit
    left: list[Job] = []
    for number, job in enumerate(jobs, 1):
        row = results.row(job)
        if row is not None and retry and row["status"] in (FAILED, TIMED_OUT):
            results.forget(job)
            row = None
        if row is not None:
            continue
        if job.absent is not None:
            results.add(job, NOT_HERE, 0.0, error=job.absent)
            continue
        remaining = deadline - time.monotonic()
        if left or remaining < min(_LEAST_SECONDS, job.seconds):
            left.append(job)  # in order: the next call begins with it
            continue
        progress(f"[{number}/{len(jobs)}] {job.key}")
        if not _run(job, results, remaining):
            left.append(job)
    return left


def check_keys(jobs: Sequence[Job]) -> None:
    keys = [job.key for job in jobs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ArgumentError(f"jobs: {twice[0]} is there twice; every job needs a name of its own")


def _run(job: Job, results: Results, remaining: float) -> bool:
    """False if the call's time was over before the job's own."""
    scratch = results.folder / "running.json"
    scratch.unlink(missing_ok=True)
    command = [str(scratch) if part == RESULT_PATH else part for part in job.command]
    seconds = min(job.seconds, remaining)
    began = time.monotonic()
    status, output = _ended(command, {**os.environ, **job.environment}, results.folder / "output.txt", seconds)
    took = time.monotonic() - began
    kept = {"output": output} if job.keeps_output else {}
    output = output[-_SHOWN_OUTPUT:]
    if status == LEFT and job.continues:
        return False
    if status is None:
        if seconds < job.seconds:
            return False
        results.add(job, TIMED_OUT, took, error=f"not ended within {job.seconds:g} s", output=output)
        return True
    found = _read(scratch)
    if status not in job.accepts or (found is None and RESULT_PATH in job.command):
        why = f"exit status {status}" if status else "it wrote no result"
        partly = {"result": found} if found is not None else {}  # a check that did not hold still has its figures
        results.add(job, FAILED, took, error=f"{why}: {_last_line(output)}", output=output, **partly)
    else:
        results.add(job, DONE, took, result=found, **kept)
    scratch.unlink(missing_ok=True)
    return True


def _ended(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> tuple[int | None, str]:
    """Exit status (None: it was ended after so many seconds) and the end of what it said."""
    with log.open("w+b") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):  # and whatever it has started: it has a process group of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_OUTPUT))
        return status, file.read().decode(errors="replace")


_libc = ctypes.CDLL(None)  # before any fork: a forked process only calls it


def _die_with_parent() -> None:
    """A killed parent must not leave a measurement behind that disturbs the next one."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _plain(values: Mapping[str, Any]) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(values))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or cut short
        return None


def _rows_of(report: Any) -> list[Row]:
    return list(report.get("rows", [])) if isinstance(report, dict) else []


def _write(path: Path, values: Mapping[str, Any]) -> None:
    new = path.with_suffix(".new")
    with naming_write_errors(path):
        new.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(new, path)

"""Runs first on a GPU: steps buckets down and up and compares the bits with a synchronous run on the CPU.

It takes seconds, and says what it is doing before it does it, so that a hang shows where.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.bare_machine import PACKAGES
from benchmarks.gpu_suite.devices import open_device
from benchmarks.gpu_suite.given_gradients import Run, train
from benchmarks.report import installed
from superoffload.errors import ArgumentError

WAYS = {"flag": True, "event": False}  # how the host notices an arrival: CudaOptions.arrival_flag
_SANITIZER = "compute-sanitizer"
_FOUND = 99  # its exit status after it found an error
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_OWN_TROUBLE = re.compile(r"Device not supported|Internal Sanitizer Error")
_REPORT = re.compile(r"Invalid|Misaligned|Uninitialized|Leaked|Program hit")


def run_smoke(device_name: str) -> dict[str, Any]:
    """Returns ``wrong``: what differs from the CPU, or a way that was not taken; empty if all is well."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    say(f"torch {torch.__version__}, CUDA {torch.version.cuda}; opening {device_name}")
    device = open_device(device_name)
    say(f"{device.facts()}; the reference on the CPU")
    expected = train("cpu", torch.bfloat16, speculation="never")
    found: dict[str, Any] = {**device.facts(), "ways": {}, "wrong": []}
    for way, flag in WAYS.items():
        say(f"down, step, up; arrivals by {way}")
        run = train(device_name, torch.bfloat16, speculation="always", link={"arrival_flag": flag})
        facts = {name: run.link[name] for name in ("uses_flag", "pinned", "pinned_bytes")}
        facts["kernels"] = run.link["residency"] is not None
        wrong = differences(run, expected)
        if device.kind != "cpu":  # the link goes on without, but no figure of it would count
            wrong += [f"no {what} here" for what in ("kernels", "pinned") if not facts[what]]
        counts = {name: run.stats[f"buckets_{name}"] for name in ("committed", "replayed", "skipped", "undone")}
        found["ways"][way] = {**facts, **counts, "wrong": wrong}
        found["wrong"] += [f"{way}: {text}" for text in wrong]
        say(f"{facts}, {counts}: {wrong or 'the bits of the CPU'}")
    if device.kind == "cuda":
        found["versions"] = {"torch_cuda": torch.version.cuda, **installed(*PACKAGES)}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def differences(run: Run, expected: Run) -> list[str]:
    """Describes differences: step by step, then the parameters."""
    found = []
    for step, (one, other) in enumerate(zip(run.digests, expected.digests, strict=True)):
        parts = sorted(name for name in other if one[name] != other[name])
        if parts or run.norms[step] != expected.norms[step]:
            norms = f"norm {run.norms[step]!r} instead of {expected.norms[step]!r}"
            found.append(f"step {step}: {', '.join(parts) or 'no part of the state'} differs, {norms}")
    for index, (param, other_param) in enumerate(zip(run.parameters, expected.parameters, strict=True)):
        unequal = int((param != other_param).sum())
        if unequal:
            found.append(f"parameter {index}: {unequal} of {param.numel()} elements differ")
    return found


# ---- under NVIDIA's memory checker -----------------------------------------------------------------------------------


def sanitizer() -> str | None:
    """Returns the program's path, from PATH or a CUDA toolkit; None without one."""
    places = [shutil.which(_SANITIZER), *map(str, sorted(Path("/usr/local").glob(f"cuda*/bin/{_SANITIZER}")))]
    return next((place for place in places if place is not None), None)


def run_sanitized(device_name: str, seconds: float) -> dict[str, Any]:
    """Runs the same under compute-sanitizer: ``wrong`` has what it found; ``unchecked`` why it could not look."""
    program = sanitizer()
    if program is None:
        raise ArgumentError(f"{_SANITIZER} is not installed: it is part of the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [
            program, "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all",
            "--error-exitcode", str(_FOUND), "--log-file", str(log),
            sys.executable, "-m", "benchmarks.gpu_suite.child", "smoke", json.dumps({"device_name": device_name}),
            os.devnull,
        ]  # fmt: skip
        try:
            status: int | None = subprocess.run(command, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            status = None
        said = log.read_text(errors="replace") if log.exists() else ""
    print(said, flush=True)
    return judged(status, said, seconds)


def judged(status: int | None, said: str, seconds: float) -> dict[str, Any]:
    """Judges the exit status (None: not ended) and the output of compute-sanitizer."""
    if status is None:
        return {"unchecked": f"not ended within {seconds:g} s", "wrong": []}
    summary = _ERRORS.findall(said)
    if not summary:
        lines = [line.strip("= ") for line in said.splitlines() if "rror" in line]
        return {"unchecked": lines[0] if lines else f"it ended with {status} and no summary", "wrong": []}
    trouble = _OWN_TROUBLE.search(said)
    if trouble and not _REPORT.search(said):
        return {"unchecked": f"{trouble[0]}; the log has all of it", "wrong": []}
    errors = int(summary[-1])
    if errors == 0 and status != 0:  # without the tool the same program has just run well: its own trouble
        return {"unchecked": f"what it ran ended with {status}; the log has why", "wrong": []}
    return {"errors": errors, "wrong": [f"{errors} errors; the log has them"] if errors else []}

"""Runs first on a GPU: steps buckets down and up and compares the bits with a synchronous run on the CPU.

It takes seconds, and says what it is doing before it does it, so that a hang shows where.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_suite.bare_machine import PACKAGES
from benchmarks.gpu_suite.devices import open_device
from benchmarks.gpu_suite.given_gradients import Run, train
from benchmarks.report import installed

WAYS = {"flag": True, "event": False}  # how the host notices an arrival: CudaOptions.arrival_flag


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

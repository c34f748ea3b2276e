"""Checks one step, speculated and undone, on every instruction set of this machine: the bits must be the old ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from superoffload import kernels
from superoffload.tools.doctor.findings import Examination

_NUMEL = 3 * kernels.BLOCK + 37  # whole blocks and a tail
_HYPER = kernels.Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=1)

State = tuple[bytes, bytes, bytes]


def examine_undo() -> Examination:
    """Checks undo and replay, and that every set gives the same bits."""
    found = Examination("self-test")
    results: dict[str, State | None] = {}
    for isa in kernels.available_isas():
        with kernels.using_isa(isa):
            results[isa], failures = try_undo()
        found.facts[isa] = failures or "exact"
        for failure in failures:
            found.problem(
                f"{isa}: {failure}",
                f"do not train with it; choose another set with {kernels.ISA_VARIABLE}, look at the machine's memory, "
                f"and report this with the output of superoffload doctor --json",
            )
        if not failures:
            found.ok(f"{isa}: a speculated step was undone and replayed, every bit as it has to be")
    if len(set(results.values())) > 1:
        found.problem(
            f"{', '.join(results)} give different bits for the same step",
            "report this with the output of superoffload doctor --json",
        )
    return found


def try_undo() -> tuple[State, list[str]]:
    """Returns (the state after a replay, the failures) on the current set."""
    arrays = _arrays()
    span = kernels.Span(*arrays)
    for step in (1, 2, 3):
        span.step(_hyper(step))
    before = _bits(arrays)
    failures = []
    if not span.step_journaled(_hyper(4)):
        failures.append("the journal had no room although every element may escape")
        return before, failures
    if _bits(arrays) == before:
        failures.append("a step changed nothing")
    span.undo()
    if _bits(arrays) != before:
        failures.append("undo did not restore the old bits of master, exp_avg and exp_avg_sq")
    span.step(_hyper(4, 0.5))
    expected = _bits(arrays)
    again = _arrays()
    span = kernels.Span(*again)
    for step in (1, 2, 3):
        span.step(_hyper(step))
    span.step_journaled(_hyper(4))
    span.replay(_hyper(4, 0.5))
    if _bits(again) != expected:
        failures.append("replay gave other bits than undo followed by a step")
    return _bits(again), failures


def _hyper(step: int, factor: float = 1.0) -> kernels.Hyper:
    return kernels.Hyper(**{**vars(_HYPER), "step": step, "gradient_factor": factor})


def _arrays() -> tuple[Any, ...]:
    """Returns ordinary values, with the awkward ones in front: zeros, denormals, an infinity, a NaN."""
    draw = np.random.default_rng(20)
    master = draw.standard_normal(_NUMEL).astype(np.float32)
    gradient = (0.01 * draw.standard_normal(_NUMEL)).astype(np.float32)
    master[:4] = (0.0, -0.0, 1e-42, 3e38)
    gradient[:6] = (0.0, -0.0, 1e-42, np.inf, np.nan, 1e-30)
    bf16 = (gradient.view(np.uint32) >> 16).astype(np.uint16)
    return master, np.zeros(_NUMEL, np.float32), np.zeros(_NUMEL, np.float32), bf16, np.zeros(_NUMEL, np.uint16)


def _bits(arrays: tuple[Any, ...]) -> State:
    master, exp_avg, exp_avg_sq = (array.tobytes() for array in arrays[:3])
    return master, exp_avg, exp_avg_sq

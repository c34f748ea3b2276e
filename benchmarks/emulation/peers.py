"""Computes other systems' times in the same model by arithmetic, without running them."""

from __future__ import annotations

from benchmarks.emulation.machine import Machine, Operation, Workload
from superoffload.engine.schedule import Kind, StepTimes, period

_FP32, _NORM = 4.0, 2.0  # bytes per parameter on the link, and read for the norm


def synchronous(workload: Workload, machine: Machine) -> float:
    """Overlaps nothing: fp32 gradients down, their norm, one pass, fp32 parameters up."""
    numel = workload.parameters
    link = _FP32 * numel / machine.down + _FP32 * numel / machine.up
    norm = _NORM * numel / machine.memory
    return workload.forward + workload.backward + link + norm + machine.seconds(Operation.step, numel)


def in_backward(workload: Workload, machine: Machine) -> float:
    """Steps each bucket in backward, for good, and so cannot clip; forward begins when all are done."""
    step = machine.seconds(Operation.step, workload.parameters)
    times = StepTimes(
        workload.first_forward + workload.between,
        reading=workload.first_forward,
        backward=workload.last_backward,
        step=step,
        journaled=step,  # without a journal: nothing can be undone
        replay=step,
        publish=step,
        settle=0.0,
        on_demand=False,
        withdraws=False,
    )
    return period(times, (Kind(1.0, 0.0, clips=False),), workload.layers)

"""Estimates the seconds of one step: arithmetic, collectives, and the optimizer's hidden and exposed parts.

It models 64 equal buckets that become ready evenly over backward, go down the link one after the other, are stepped by
the processor one after the other, and go up again. It knows bandwidths and no latencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from superoffload.tools.plan.machines import Hardware
from superoffload.tools.plan.memory_estimate import GPU_SHARE, Settings, check_fit
from superoffload.tools.plan.models import ModelShape

BUCKETS = 64
# Host bytes per parameter of one pass (docs/kernel.md): master and moments both ways, bf16 gradient and shadow.
PLAIN_BYTES, JOURNALED_BYTES, REPLAY_BYTES = 28.0, 29.2, 30.4
COPY_ON_GPU_BYTES = 4.0  # staged parameters are read, and written to where the model reads them
UNSTAGED = 2  # buckets, the last ones of backward, whose parameters travel after the verdict
STATE_SAVING = {"fp32": 0.0, "bf16": 8.0, "8bit": 12.0}  # bytes less: moments are read and written
SPLIT_MASTER_SAVING = 2.0  # bytes less: of 8 for the master and 2 for the shadow, 4 + 4 stay
# DeepSpeed's path: fp32 gradient in, master and moments both ways, then a cast of the master to bf16.
ZERO_OFFLOAD_BYTES = 4.0 + 24.0 + 6.0
DEEPSPEED_OF_LIMIT = 1 / 1.3  # its kernel against a faster one on Grace, as SuperOffload's authors measured
# Exposed per layer by stage 3's gathers and hooks; fitted to the published stage 3 row (docs/plan.md), which it
# therefore cannot predict.
ZERO3_SECONDS_PER_LAYER = 1.7e-3


@dataclass(frozen=True)
class StepTime:
    """Holds seconds of one step of one rank; `total` is the step, `optimizer_hidden` runs beside other work."""

    forward: float
    backward: float
    collectives: float
    optimizer: float
    optimizer_exposed: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.collectives + self.optimizer_exposed

    @property
    def optimizer_hidden(self) -> float:
        return max(0.0, self.optimizer - self.optimizer_exposed)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "total": self.total, "optimizer_hidden": self.optimizer_hidden}


def estimate_step(model: ModelShape, hardware: Hardware, settings: Settings) -> StepTime:
    seconds = settings.tokens_per_step * model.flops_per_token(settings.sequence)
    seconds /= hardware.flops * settings.utilization
    forward, backward = seconds / 3, seconds * (2 / 3 + (1 / 3 if settings.checkpointing == "full" else 0))
    collectives = _exposed_collectives(model, hardware, settings, forward + backward)
    own = model.parameters / (1 if settings.sharding == "none" and settings.engine == "torch" else settings.ranks)
    if settings.engine == "torch":
        optimizer = PLAIN_BYTES * own / hardware.gpu_bandwidth
        return StepTime(forward, backward, collectives, optimizer, optimizer)
    # Only the last micro-batch's backward makes gradients final; collectives stretch it in proportion.
    window = (backward + collectives * 2 / 3) / settings.accumulation
    if settings.engine == "zero-offload":
        optimizer, exposed = _zero_offload(own, hardware, window)
    elif settings.engine == "deepspeed-superoffload":
        optimizer, exposed = _deepspeed_superoffload(own, hardware, settings, window)
    else:
        optimizer, exposed = _superoffload(
            own, hardware, settings, window, stages=_stages(model, hardware, settings, own)
        )
    return StepTime(forward, backward, collectives, optimizer, exposed)


def _exposed_collectives(model: ModelShape, hardware: Hardware, settings: Settings, compute: float) -> float:
    """Returns what compute does not hide: FSDP2 prefetches; for ZeRO nothing is taken as hidden."""
    if settings.ranks == 1:
        return ZERO3_SECONDS_PER_LAYER * model.layers if settings.sharding == "zero3" else 0.0
    share = (settings.ranks - 1) / settings.ranks
    once = share * 2 * model.parameters / hardware.collectives
    if settings.sharding == "zero3":
        return settings.accumulation * (3 * once + ZERO3_SECONDS_PER_LAYER * model.layers)
    if settings.sharding == "fsdp2":
        seconds = settings.accumulation * 3 * once
        return max(seconds - compute, 2 * once / model.layers)
    return 2 * once


def _zero_offload(own: float, hardware: Hardware, window: float) -> tuple[float, float]:
    """Models gradients that go down during backward; the step and the way up come after it."""
    pass_seconds = ZERO_OFFLOAD_BYTES * own / (hardware.host_bandwidth * DEEPSPEED_OF_LIMIT)
    down, up = 2 * own / hardware.link_down, 2 * own / hardware.link_up
    return down + pass_seconds + up, max(0.0, down - window) + pass_seconds + up


def _deepspeed_superoffload(own: float, hardware: Hardware, settings: Settings, window: float) -> tuple[float, float]:
    """Models steps during backward without clipping, and after it with clipping; fp32 moves both ways."""
    on_host = (1 - GPU_SHARE) * own
    pass_seconds = PLAIN_BYTES * on_host / hardware.host_bandwidth
    down, up = 4 * on_host / hardware.link_down, 4 * on_host / hardware.link_up
    on_gpu = PLAIN_BYTES * GPU_SHARE * own / hardware.gpu_bandwidth
    if settings.clip_rate > 0:
        return down + pass_seconds + up + on_gpu, max(0.0, down - window) + pass_seconds + up + on_gpu
    finished = _pipeline(window, [down, pass_seconds, up])
    return down + pass_seconds + up + on_gpu, finished - window + on_gpu


def _stages(model: ModelShape, hardware: Hardware, settings: Settings, own: float) -> bool:
    """Returns whether new parameters travel before the verdict: half of the GPU's memory free at its peak must hold the
    gradients, which leave as they are packed (docs/pipeline.md)."""
    if settings.is_replicated or settings.sharding == "zero3":
        return False
    fit = check_fit(model, hardware, settings)
    return fit.gpu_room - fit.gpu_need >= 2 * settings.gradient_bytes * (1 - settings.gpu_fraction) * own


def _superoffload(
    own: float, hardware: Hardware, settings: Settings, window: float, *, stages: bool
) -> tuple[float, float]:
    """Models speculation that commits or is replayed; with frequent clips, adaptive waits for the verdict instead.

    State on the GPU (placement) becomes ready last, and is stepped there after the verdict.
    """
    wider = settings.gradient_bytes - 2
    on_gpu = (PLAIN_BYTES + wider) * settings.gpu_fraction * own / hardware.gpu_bandwidth
    on_host = (1 - settings.gpu_fraction) * own
    down, up = settings.gradient_bytes * on_host / hardware.link_down, 2 * on_host / hardware.link_up
    saving = _saving(settings)
    plain, journaled, replay = (
        (size + wider - saving) * on_host / hardware.host_bandwidth
        for size in (PLAIN_BYTES, JOURNALED_BYTES, REPLAY_BYTES)
    )
    ready = (1 - settings.gpu_fraction) * window
    stepped = max(0.0, _pipeline(ready, [down, journaled]) - window)
    verdict = max(0.0, _pipeline(ready, [down]) - window)
    after_commit = max(stepped + up / BUCKETS, verdict + up)
    if stages:
        there = max(0.0, _pipeline(ready, [down, journaled, up]) - window)
        across = COPY_ON_GPU_BYTES * on_host / hardware.gpu_bandwidth
        after_commit = max(there, verdict + UNSTAGED * up / BUCKETS) + across
    after_replay = max(stepped, verdict) + max(replay, up) + min(replay, up) / BUCKETS
    after_one_pass = verdict + max(plain, up) + min(plain, up) / BUCKETS
    speculating = (1 - settings.clip_rate) * after_commit + settings.clip_rate * after_replay
    if speculating <= after_one_pass:
        return down + journaled + settings.clip_rate * replay + up + on_gpu, speculating + on_gpu
    return down + plain + up + on_gpu, after_one_pass + on_gpu


def _saving(settings: Settings) -> float:
    """Returns the host bytes per parameter that a pass moves less than one over fp32 state."""
    return STATE_SAVING[settings.state_dtype] + (SPLIT_MASTER_SAVING if settings.master_dtype == "split" else 0.0)


def plain_pass_seconds(own: float, host_bandwidth: float, settings: Settings) -> float:
    """Returns the time of superoffload's plain step over ``own`` parameters, by the processors alone."""
    saving = _saving(settings)
    return (PLAIN_BYTES + settings.gradient_bytes - 2 - saving) * own / host_bandwidth


def _pipeline(window: float, stages: Sequence[float]) -> float:
    """Returns when the last bucket leaves the last stage, counted from backward's start; stages take one at a time."""
    free = [0.0] * len(stages)
    done = 0.0
    for bucket in range(1, BUCKETS + 1):
        done = window * bucket / BUCKETS
        for stage, seconds in enumerate(stages):
            done = free[stage] = max(done, free[stage]) + seconds / BUCKETS
    return done

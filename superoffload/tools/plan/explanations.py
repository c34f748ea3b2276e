"""Explains a plan's numbers for superoffload: the journal's reservation, and what placement="auto" would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from superoffload.engine.journal_reservation import JOURNAL_BYTES_PER_PARAM, KEPT_JOURNAL_BYTES_PER_PARAM
from superoffload.engine.placement_choice import STEPS_MEASURED, Measured, choose_fraction
from superoffload.tools.plan.machines import GB
from superoffload.tools.plan.memory_estimate import BUCKET_ELEMENTS, JOURNAL, Fit, Needs, Settings
from superoffload.tools.plan.models import ModelShape
from superoffload.tools.plan.step_time import StepTime, plain_pass_seconds

# Means of a run without clips, and of one whose speculated gradients are 3 times the clipped (docs/benchmarks.md).
JOURNAL_USED_BYTES = (1.1, 1.25)
_BUCKETS, _SMALLEST_BUCKET = 32, 1 << 16  # an optimizer's default choice of buckets


@dataclass(frozen=True)
class AutoPlacement:
    """Predicts what placement="auto" would choose if it measured what the plan expects."""

    fraction: float
    why: str
    gpu_bytes: float

    def as_json(self) -> dict[str, Any]:
        return {"gpu_fraction": self.fraction, "gpu_bytes": self.gpu_bytes, "why": self.why}


def own_parameters(model: ModelShape, settings: Settings) -> float:
    """Returns how many parameters' state this rank keeps."""
    return model.parameters / settings.ranks


def auto_placement(
    model: ModelShape, settings: Settings, fit: Fit, step: StepTime, host_bandwidth: float
) -> AutoPlacement | None:
    """Returns None without such a choice: another engine, DeepSpeed's partitions, or a given fraction."""
    if not settings.can_place or settings.gpu_fraction > 0:
        return None
    own = own_parameters(model, settings)
    bytes_per_param = settings.placed_bytes
    per_bucket = min(max(own / _BUCKETS, _SMALLEST_BUCKET), BUCKET_ELEMENTS)
    measured = Measured(
        backward=step.backward / settings.accumulation,
        optimizer=plain_pass_seconds(own, host_bandwidth, settings),
        free_bytes=int(fit.gpu_room - fit.gpu_need),
        numel=int(own),
        bytes_per_param=bytes_per_param,
        buckets=max(1, round(own / per_bucket)),
    )
    fraction, why = choose_fraction(measured)
    return AutoPlacement(fraction, why, fraction * own * bytes_per_param)


def placement_lines(auto: AutoPlacement | None) -> list[str]:
    if auto is None:
        return []
    share = f"{auto.fraction:.1%} of the" if auto.fraction else "no"
    return [
        f'placement="auto" would keep {share} state on the GPU ({auto.gpu_bytes / GB:.1f} GB); the plan keeps none:',
        f"  {auto.why}.",
        f"  It chooses once, after {1 + STEPS_MEASURED} steps, by what it measured in them;",
        '  placement={"gpu_fraction": f} sets it, None (default) keeps all state in host memory.',
    ]


def journal_lines(model: ModelShape, settings: Settings, needs: Needs) -> list[str]:
    if JOURNAL not in needs.host:
        return []
    own = own_parameters(model, settings)
    low, high = JOURNAL_USED_BYTES
    return [
        f"  The journals share a reservation of {JOURNAL_BYTES_PER_PARAM:g} bytes per parameter; on average {low} to "
        f"{high} are used ({low * own / GB:.1f} to {high * own / GB:.1f} GB). Memory",
        "  that is never used is never taken from the system; what spikes need beyond "
        f"{KEPT_JOURNAL_BYTES_PER_PARAM:g} bytes goes back after them.",
    ]

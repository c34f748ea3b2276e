"""Chooses what to recommend: the fastest settings that fit, a larger batch, the largest model that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.tools.plan.machines import Hardware
from superoffload.tools.plan.memory_estimate import ENGINES, MOMENTS_BYTES, Fit, Settings, check_fit, keeps_less
from superoffload.tools.plan.models import ModelShape, typical_shape
from superoffload.tools.plan.step_time import StepTime, estimate_step

EXACT = ("torch", "superoffload")  # engines that apply every gradient once, with clipping
SIMPLER = 0.95  # share of the best rate at which simpler settings are recommended: the model is not more exact
WORTH_DOUBLING = 1.2  # times the rate, for which a batch twice as large is recommended
MOST_DOUBLINGS = 6
MOST_TOKENS = 4_000_000  # the most that is recommended, per step over all ranks
# In the order that docs/engines.md prefers.
SHARDING_ORDER = ("fsdp2", "none", "zero3", "zero2", "zero1")
_FRACTIONS = 8  # tried parts of the room for state on the GPU


@dataclass(frozen=True)
class Choice:
    settings: Settings
    fit: Fit
    step: StepTime

    @property
    def tokens_per_second(self) -> float:
        """Counts the tokens of all ranks."""
        return self.settings.tokens_per_step * self.settings.ranks / self.step.total

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": vars(self.settings),
            "fits": self.fit.fits,
            "binds": self.fit.binds,
            "step_seconds": self.step.total,
            "exposed_seconds": self.step.optimizer_exposed,
            "tokens_per_second": self.tokens_per_second,
        }


def evaluate(model: ModelShape, hardware: Hardware, settings: Settings) -> Choice:
    return Choice(settings, check_fit(model, hardware, settings), estimate_step(model, hardware, settings))


def all_choices(model: ModelShape, hardware: Hardware, base: Settings) -> list[Choice]:
    """Returns every engine, sharding and checkpointing for the ranks and batch of `base`, the fastest first.

    If state could stay on the GPU, there are two of each: without, and with the fastest placement.
    """
    choices = []
    for variant in _variants(base):
        plain, *placed = (evaluate(model, hardware, settings) for settings in _placements(model, hardware, variant))
        choices += [plain, *sorted(placed, key=lambda choice: choice.step.total)[:1]]
    return sorted(choices, key=lambda choice: -choice.tokens_per_second)


def _variants(base: Settings, engines: tuple[str, ...] = ENGINES) -> Iterator[Settings]:
    for engine in engines:
        for sharding in SHARDING_ORDER:
            if sharding != "none" and base.ranks == 1 and engine not in ("zero-offload", "deepspeed-superoffload"):
                continue
            dtypes = (base.state_dtype, base.master_dtype) if keeps_less(engine) else ("fp32", "fp32")
            plain = replace(base, state_dtype="fp32", master_dtype="fp32", gpu_fraction=0.0)
            for checkpointing in ("none", "full"):
                try:
                    variant = replace(plain, engine=engine, sharding=sharding, checkpointing=checkpointing)
                    yield replace(variant, state_dtype=dtypes[0], master_dtype=dtypes[1])
                except ArgumentError:  # a combination that does not exist
                    continue


def _splits(base: Settings, times: int) -> Iterator[Settings]:
    """Yields micro-batches and accumulation with `times` the tokens of a step; those of `base` first."""
    total = base.micro_batch * base.accumulation * times
    yield replace(base, accumulation=base.accumulation * times)
    for power in range(-10, 11):
        micro = int(base.micro_batch * 2.0**power)
        if micro >= 1 and micro != base.micro_batch and micro == base.micro_batch * 2.0**power and total % micro == 0:
            yield replace(base, micro_batch=micro, accumulation=total // micro)


def _placements(model: ModelShape, hardware: Hardware, settings: Settings) -> Iterator[Settings]:
    """Yields settings without placement first, then with growing parts of what the GPU's free memory holds."""
    yield settings
    if not settings.can_place:
        return
    fit = check_fit(model, hardware, settings)
    own = model.parameters / settings.ranks
    most = min(1.0, (fit.gpu_room - fit.gpu_need) / (settings.placed_bytes * own))
    for step in range(1, _FRACTIONS + 1):
        fraction = int(1000 * most * step / _FRACTIONS) / 1000
        if fraction > 0:
            yield replace(settings, gpu_fraction=fraction)


def recommend(model: ModelShape, hardware: Hardware, base: Settings, times: int = 1) -> Choice | None:
    """Returns the fastest choice that fits with `times` the tokens per step of `base`; within 5 % of it the simplest.

    It chooses engine (of those that step exactly), sharding, checkpointing, placement and the split in micro-batches.
    """
    fitting = [
        choice
        for variant in _variants(base, EXACT)
        for split in _splits(variant, times)
        for settings in _placements(model, hardware, split)
        if (choice := evaluate(model, hardware, settings)).fit.fits
    ]
    best = max((choice.tokens_per_second for choice in fitting), default=0.0)
    return next((choice for choice in fitting if choice.tokens_per_second >= SIMPLER * best), None)


@dataclass(frozen=True)
class Batches:
    """Holds the best settings per size of a step, from the asked one on, each twice the one before; `chosen` is one."""

    sizes: list[Choice]
    chosen: int


def larger_batches(model: ModelShape, hardware: Hardware, base: Settings) -> Batches | None:
    """Finds the size from which on a doubling is no longer worth it; None if nothing fits."""
    found: list[Choice] = []
    for doubling in range(MOST_DOUBLINGS + 1):
        if found and base.tokens_per_step * base.ranks << doubling > MOST_TOKENS:
            break
        choice = recommend(model, hardware, base, 1 << doubling)
        if choice is None:
            break
        found.append(choice)
    if not found:
        return None
    worth = [choice.tokens_per_second / WORTH_DOUBLING**doubling for doubling, choice in enumerate(found)]
    chosen = worth.index(max(worth))
    return Batches(found[: chosen + 2], chosen)


def what_would_fit(model: ModelShape, hardware: Hardware, base: Settings) -> list[Choice]:
    """Returns the fewest ranks, the longest sequence and the least change of masters and moments that make the model
    fit, each changed alone."""
    ranks = (replace(base, ranks=base.ranks << power) for power in range(1, 11))
    shorter = (replace(base, sequence=base.sequence >> power) for power in range(1, 5) if base.sequence >> power >= 128)
    stored = list(MOMENTS_BYTES)
    dtypes = tuple(
        replace(base, state_dtype=moments, master_dtype=master)
        for moments in stored[stored.index(base.state_dtype) :]
        for master in dict.fromkeys((base.master_dtype, "split"))
        if keeps_less(base.engine) and (moments, master) != (base.state_dtype, base.master_dtype)
    )
    found = []
    for changed in (dtypes, shorter, ranks):
        choices = (recommend(model, hardware, settings) for settings in changed)
        found.append(next((choice for choice in choices if choice is not None), None))
    return [choice for choice in found if choice is not None]


def largest_model(hardware: Hardware, settings: Settings) -> ModelShape | None:
    """Returns the largest decoder of usual proportions that fits; None if not even one of 10 M parameters does."""
    low, high = 1e7, 4e12
    if not _fits(low, hardware, settings):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _fits(middle, hardware, settings) else (low, middle)
    return typical_shape(low)


def _fits(parameters: float, hardware: Hardware, settings: Settings) -> bool:
    return check_fit(typical_shape(parameters), hardware, settings).fits

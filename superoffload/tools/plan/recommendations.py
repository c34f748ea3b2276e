"""Presents a plan's advice as text and as JSON: for the batch as asked, a larger one, and what would fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from superoffload.tools.plan.configuration import configuration, configuration_notes
from superoffload.tools.plan.machines import Hardware
from superoffload.tools.plan.memory_estimate import Settings
from superoffload.tools.plan.models import ModelShape
from superoffload.tools.plan.settings import (
    WORTH_DOUBLING,
    Batches,
    Choice,
    evaluate,
    larger_batches,
    largest_model,
    what_would_fit,
)


@dataclass(frozen=True)
class Advice:
    """Holds a plan's advice; `batches` is None if nothing fits, and only then `would_fit` matters."""

    asked: Choice
    batches: Batches | None
    would_fit: list[Choice]
    largest: ModelShape | None
    gpus_per_node: int

    @classmethod
    def of(cls, model: ModelShape, hardware: Hardware, settings: Settings) -> Advice:
        batches = larger_batches(model, hardware, settings)
        would_fit = [] if batches else what_would_fit(model, hardware, settings)
        asked, largest = evaluate(model, hardware, settings), largest_model(hardware, settings)
        return cls(asked, batches, would_fit, largest, hardware.gpus_per_node)

    @property
    def same_batch(self) -> Choice | None:
        return self.batches.sizes[0] if self.batches else None

    @property
    def larger_batch(self) -> Choice | None:
        """Returns None if more tokens per step are not worth it, or do not fit."""
        return self.batches.sizes[self.batches.chosen] if self.batches and self.batches.chosen else None

    def gain(self, choice: Choice) -> float | None:
        """Returns the gain over what was asked; None if that does not fit."""
        return choice.tokens_per_second / self.asked.tokens_per_second if self.asked.fit.fits else None

    def as_json(self) -> dict[str, Any]:
        return {
            "largest_model_parameters": self.largest.parameters if self.largest else None,
            "recommended": self._json(self.same_batch),
            "recommended_with_a_larger_batch": self._json(self.larger_batch),
            "would_fit": [choice.as_json() for choice in self.would_fit],
        }

    def _json(self, choice: Choice | None) -> dict[str, Any] | None:
        if choice is None:
            return None
        return {**choice.as_json(), "gain": self.gain(choice), "configuration": configuration(choice.settings)}


def name_of(settings: Settings) -> str:
    sharding = "" if settings.sharding == "none" else f" with {settings.sharding}"
    checkpointing = ", checkpointing" if settings.checkpointing == "full" else ""
    placed = f", {settings.gpu_fraction:.1%} of the state on the GPU" if settings.gpu_fraction else ""
    return f"{settings.engine}{sharding}{checkpointing}{placed}"


def advice_lines(advice: Advice) -> list[str]:
    largest = advice.largest
    size = f"{largest.parameters / 1e9:.1f} B parameters" if largest else "not even one of 10 M parameters"
    lines = [f"Largest model with these settings: {size}"]
    if advice.batches is None or advice.same_batch is None:
        return [*lines, *_would_fit_lines(advice)]
    best, larger = advice.same_batch, advice.larger_batch
    split = f"--accumulation {best.settings.accumulation} --micro-batch {best.settings.micro_batch}"
    lines.append(f"Recommended with the tokens per step as asked: {split}, {_described(advice, best)}")
    lines += _pasted(best.settings)
    lines += _size_lines(advice.batches)
    if larger is not None:
        lines.append(
            f"Recommended with a larger batch, if your training allows it: --accumulation "
            f"{larger.settings.accumulation} --micro-batch {larger.settings.micro_batch}, {_described(advice, larger)}"
        )
        if configuration(larger.settings) != configuration(best.settings):
            lines += _pasted(larger.settings)
    return lines


def _described(advice: Advice, choice: Choice) -> str:
    gain = advice.gain(choice)
    against = "" if gain is None else f", {gain:.2f} x the settings above"
    return f"{name_of(choice.settings)}, {choice.tokens_per_second:,.0f} tokens/s{against}"


def _pasted(settings: Settings) -> list[str]:
    notes = [f"({note})" for note in configuration_notes(settings)]
    return [f"  {line}".rstrip() for line in (*notes, *configuration(settings).splitlines())]


def _size_lines(batches: Batches) -> list[str]:
    if batches.chosen == 0:
        first, *second = (choice.tokens_per_second for choice in batches.sizes)
        return [
            f"A larger batch is not worth it: twice the tokens give {x / first:.2f} x the tokens/s." for x in second
        ]
    lines = [
        "More tokens per step hide more of the optimizer. They change the global batch, so that is for you to decide:",
        f"  {'tokens/step':>11} {'accumulation':>12} {'micro-batch':>11} {'step, s':>8} {'exposed, s':>10} "
        f"{'tokens/s':>9}  settings",
    ]
    for index, choice in enumerate(batches.sizes):
        settings, step = choice.settings, choice.step
        mark = "  <- recommended" if index == batches.chosen else ""
        lines.append(
            f"  {settings.tokens_per_step:>11,} {settings.accumulation:>12} {settings.micro_batch:>11} "
            f"{step.total:>8.3f} {step.optimizer_exposed:>10.3f} {choice.tokens_per_second:>9,.0f}  "
            f"{name_of(settings)}{mark}"
        )
    lines.append(f"  (per rank; a doubling is recommended where it brings {WORTH_DOUBLING:g} times the tokens/s)")
    return lines


def _would_fit_lines(advice: Advice) -> list[str]:
    asked = advice.asked.settings
    lines = ["With this batch nothing that is planned here fits, whatever the engine, sharding and checkpointing."]
    for choice in advice.would_fit:
        settings = choice.settings
        changes = [
            f"{text} {value}"
            for text, value, before in (
                ("--ranks", settings.ranks, asked.ranks),
                ("--sequence", settings.sequence, asked.sequence),
                ("--state-dtype", settings.state_dtype, asked.state_dtype),
                ("--master-dtype", settings.master_dtype, asked.master_dtype),
            )
            if value != before
        ]
        nodes = "; the network between nodes is not planned" if settings.ranks > advice.gpus_per_node else ""
        rate = f"{choice.tokens_per_second:,.0f} tokens/s{nodes}"
        lines.append(f"  {', '.join(changes)} would: {name_of(settings)}, {rate}")
    if not advice.would_fit:
        lines.append(
            "  Neither do 1,024 times the ranks, a 16th of the sequence or 8-bit moments with split masters: use a "
            "smaller model."
        )
    return lines

"""Trains the same twice, speculative and synchronous, side by side, and compares bit for bit after every step.

Side by side, so that the first difference can be described in full: which parameters, how many of their elements. The
two runs share nothing but the corpus: each has its own model, optimizer, worker threads and batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from superoffload.host.bits import WORD
from superoffload.tools.train.corpus import Corpus
from superoffload.tools.train.injection import Injection
from superoffload.tools.train.record import BUCKET_FATES, StepRecord, unclipped_steps
from superoffload.tools.train.run_digests import STATE_PARTS, StepDigests, gradient_digest
from superoffload.tools.train.trainer import Trainer
from superoffload.tools.train.training_config import TrainingConfig

OnStep = Callable[["ComparedStep"], None]


@dataclass(frozen=True)
class ComparedStep:
    """Holds one step of both runs. `difference` says what differs; it is empty if every digest is equal."""

    speculative: StepRecord
    synchronous: StepRecord
    speculative_digests: StepDigests
    synchronous_digests: StepDigests
    difference: str = ""

    @property
    def step(self) -> int:
        return self.speculative.step

    def as_json(self) -> dict[str, Any]:
        return {
            **self.speculative.as_json(),
            "synchronous": self.synchronous.as_json(),
            "digests": {
                "speculative": vars(self.speculative_digests),
                "synchronous": vars(self.synchronous_digests),
            },
            "equal": not self.difference,
            "difference": self.difference,
        }


@dataclass
class Verification:
    """Holds the outcome: compared steps, totals of both runs, and every problem found.

    ``inconclusive``: no problem, but some fate of speculated buckets did not occur, and so was not compared.
    """

    steps: list[ComparedStep] = field(default_factory=list)
    speculative_stats: Mapping[str, Any] = field(default_factory=dict)
    synchronous_stats: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    inconclusive: str = ""

    def keep_stats(self, speculative: Mapping[str, Any], synchronous: Mapping[str, Any]) -> None:
        self.speculative_stats, self.synchronous_stats = speculative, synchronous

    def leave_open(self, why: str) -> None:
        """Records ``why`` the comparison has a gap although nothing differs; empty: all was compared."""
        self.inconclusive = why

    @property
    def verified(self) -> bool:
        return bool(self.steps) and not self.problems and not self.inconclusive

    @property
    def compared_digests(self) -> int:
        return len(self.steps) * (1 + len(STATE_PARTS))


class _Run:
    """Holds one of the two runs, with the state it started from."""

    def __init__(self, config: TrainingConfig, corpus: Corpus, injection: Injection, speculation: str) -> None:
        self.trainer = Trainer(config.replace(speculation=speculation), corpus, injection)
        self._gradients = ""
        self.initial = StepDigests(gradients="", **self.trainer.optimizer.state_digests())

    def step(self, step: int) -> tuple[StepRecord, StepDigests]:
        record = self.trainer.train_step(step, self._hash_gradients)
        return record, StepDigests(gradients=self._gradients, **self.trainer.optimizer.state_digests())

    def _hash_gradients(self) -> None:
        self._gradients = gradient_digest(self.trainer.model)


def verify(
    config: TrainingConfig,
    corpus: Corpus,
    injection: Injection,
    *,
    must_exercise_all: bool,
    on_step: OnStep,
) -> Verification:
    """Trains twice in lock-step and compares; stops at the first difference, since all later steps differ with it."""
    result = Verification()
    speculative = _Run(config, corpus, injection, "always")
    with speculative.trainer:
        synchronous = _Run(config, corpus, injection, "never")
        with synchronous.trainer:
            before = speculative.initial
            if differing := before.differing_state(synchronous.initial):
                result.problems.append(f"before step 1: {', '.join(differing)} of the new optimizers differ")
            for step in range(1, config.steps + 1):
                compared = _compare_step(speculative, synchronous, step)
                problems = _step_problems(compared, before, injection)
                before = compared.speculative_digests
                result.steps.append(compared)
                result.problems.extend(problems)
                on_step(compared)
                if problems:
                    break
            result.keep_stats(speculative.trainer.optimizer.stats(), synchronous.trainer.optimizer.stats())
    result.problems.extend(_count_problems(result, must_exercise_all))
    if must_exercise_all and not result.problems:
        result.leave_open(_not_exercised(result.speculative_stats))
    return result


def _compare_step(speculative: _Run, synchronous: _Run, step: int) -> ComparedStep:
    record, digests = speculative.step(step)
    other_record, other_digests = synchronous.step(step)
    difference = ""
    if digests.gradients != other_digests.gradients:
        difference = (
            "the gradients that went in differ, while everything before this step was equal: forward or backward is "
            "not repeatable here, which says nothing about the optimizer"
        )
    elif differing := digests.differing_state(other_digests):
        difference = (
            f"equal gradients went in, but {', '.join(differing)} came out different: the optimizer is at fault; "
            f"{_differing_parameters(speculative.trainer, synchronous.trainer)}"
        )
    return ComparedStep(record, other_record, digests, other_digests, difference)


def _differing_parameters(speculative: Trainer, synchronous: Trainer) -> str:
    """Names the parameters whose state differs, with counts of differing elements."""
    found = []
    pairs = zip(speculative.model.named_parameters(), synchronous.model.parameters(), strict=True)
    for (name, one), other in pairs:
        for part in ("master", "exp_avg", "exp_avg_sq"):
            ours, theirs = speculative.optimizer.state[one][part], synchronous.optimizer.state[other][part]
            word = WORD[ours.dtype]
            count = int((ours.view(word) != theirs.view(word)).sum())
            if count:
                found.append(f"{part} of {name} in {count} of {ours.numel()} elements")
        if not torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8)):
            found.append(f"published {name}")
    shown = "; ".join(found[:6])
    return f"{shown}; and {len(found) - 6} more" if len(found) > 6 else shown or "no parameter differs on its own"


def _step_problems(compared: ComparedStep, before: StepDigests, injection: Injection) -> list[str]:
    events = ", ".join(compared.speculative.events)
    where = f"step {compared.step} ({events})" if events else f"step {compared.step}"
    if compared.difference:
        return [f"{where}: {compared.difference}"]
    # Equal runs could both be wrong about a step that must not happen: its state must be that of the step before.
    changed = compared.speculative_digests.differing_state(before)
    if changed and injection.at(compared.step).keeps_state:
        return [f"{where}: the step had to leave everything as it was, but {', '.join(changed)} changed"]
    return []


def _count_problems(result: Verification, must_exercise_all: bool) -> list[str]:
    problems = []
    stats = result.speculative_stats
    speculated = stats["buckets_speculated"]
    settled = sum(stats[f"buckets_{fate}"] for fate in BUCKET_FATES)
    if speculated != settled:
        problems.append(
            f"{speculated} buckets were speculated, but {settled} committed, undone, replayed, skipped or abandoned"
        )
    if result.synchronous_stats["buckets_speculated"]:
        problems.append(
            f"the synchronous run speculated {result.synchronous_stats['buckets_speculated']} buckets: "
            f"there was nothing to compare with"
        )
    missing = [fate for fate in ("speculated", "committed") if not stats[f"buckets_{fate}"]]
    if must_exercise_all and missing and unclipped_steps(stats) and not problems and not result.problems:
        problems.append(
            f"no bucket was {' or '.join(missing)}, although {unclipped_steps(stats)} steps were not clipped"
        )
    return problems


def _not_exercised(stats: Mapping[str, Any]) -> str:
    """Returns which fates did not occur, though the default events must cause all of them; empty if none."""
    unused = [fate for fate in ("speculated", *BUCKET_FATES) if not stats[f"buckets_{fate}"]]
    if not unused:
        return ""
    clipped = "" if unclipped_steps(stats) else "; every step had to be clipped: raise --max-grad-norm"
    return (
        f"no bucket was {' or '.join(unused)}, so that equal digests prove less than this command promises"
        f"{clipped}. Leave --max-grad-norm, sizes and --bucket-numel at their defaults, or choose events of your own "
        "with --inject, which need not exercise everything"
    )

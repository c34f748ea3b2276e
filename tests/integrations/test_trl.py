"""TRL's trainers that generate: offload(trainer) trains as torch's AdamW, and the optimizer may sleep meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.hugging_face import NEEDS, end, generating, logs_of, model_of, trainer_of, transformers
from tests.support.optional_packages import needs
from tests.support.over_stand_in import only_over_stand_in

pytestmark = [pytest.mark.skipif(transformers is None, reason=NEEDS), needs("trl", "datasets")]


def trainer_that_generates(folder: Path, kind: str = "GRPO", **options: Any) -> Any:
    return generating(kind, folder, lambda: model_of("qwen", torch.bfloat16), **options)


def offloaded(trainer: Any, **options: Any) -> Any:
    from superoffload.integrations.transformers import offload

    offload(trainer, threads=1, **options)
    return trainer


@pytest.mark.over_stand_in
@only_over_stand_in(kind="GRPO")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_same_bits_asleep_or_awake_and_trls_own_losses(kind: str, tmp_path: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "never": {"speculation": "never"},
        "asleep": {"speculation": "always", "sleep": True},
    }
    logs, digests = {}, {}
    slept: list[AdamW] = []
    sleep = AdamW.sleep

    def noting(self: AdamW) -> None:
        slept.append(self)
        sleep(self)

    for name, options in ways.items():
        trainer = offloaded(trainer_that_generates(tmp_path, kind), **options)
        with mock.patch.object(AdamW, "sleep", noting):
            trainer.train()
        logs[name] = [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in logs_of(trainer)]
        digests[name] = end(trainer)
    assert len(slept) == 3, "once for each step: two micro-batches share what was generated"
    assert len(logs["never"]) == 3 and any(norm > 0.5 for _, norm, _ in logs["never"])
    assert digests["asleep"] == digests["never"] and logs["asleep"] == logs["never"]
    theirs = trainer_that_generates(tmp_path, kind)
    theirs.train()
    first = logs_of(theirs)[0]  # later ones are of other samples
    assert logs["never"][0] == pytest.approx((first["loss"], first["grad_norm"], first["reward"]), rel=1e-2, abs=1e-6)


def test_an_evaluation_generates_too_and_an_error_leaves_the_optimizer_awake(tmp_path: Path) -> None:
    evaluations: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    trainer = trainer_that_generates(tmp_path, max_steps=2, **evaluations)
    generate = trainer._generate

    def generate_until_the_end(*args: Any, **options: Any) -> Any:
        if trainer.state.global_step == 2:
            raise RuntimeError("no room")
        return generate(*args, **options)

    trainer._generate = generate_until_the_end
    offloaded(trainer, sleep=True)
    before = trainer.evaluate()
    with pytest.raises(RuntimeError, match="no room"):
        trainer.train()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(rewards) == 1 and 0 <= before["eval_reward"] <= 1
    optimizer = trainer.optimizer.optimizer
    optimizer.refresh_masters()  # no StateError: it is awake
    optimizer.close()


def test_where_it_cannot_sleep(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"sleep: Trainer does not generate, .* a trainer like TRL's GRPO"):
        offloaded(trainer_of(tmp_path, model_of(), None), sleep=True)
    online = trainer_of(tmp_path, model_of(), None)
    online._generate = mock.Mock()  # as TRL's OnlineDPOTrainer has, which calls it in every micro-batch
    with pytest.raises(ArgumentError, match="not between two steps"):
        offloaded(online, sleep=True)
    trainer = trainer_that_generates(tmp_path, steps_per_generation=3)
    with pytest.raises(ArgumentError, match=r"sleep='.*none': expected True or False"):
        offloaded(trainer, sleep=str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match=r"sleep: it generates every 3 micro-batches .* a multiple of .*, 2"):
        offloaded(trainer, sleep=True)
    offloaded(trainer, sleep=None)  # awake, it works

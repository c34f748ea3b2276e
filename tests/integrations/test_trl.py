"""TRL's trainers that generate: offload(trainer) trains as torch's AdamW, and the optimizer may sleep meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.compatibility import compat
from tests.support.hugging_face import NEEDS, end, logs_of, model_of, trainer_of, transformers
from tests.support.optional_packages import needs
from tests.support.trl_trainers import generating

pytestmark = [pytest.mark.skipif(transformers is None, reason=NEEDS), needs("trl", "datasets")]

ROW = "TRL's GRPOTrainer and RLOOTrainer"


def grpo(folder: Path, kind: str, **options: Any) -> Any:
    return generating(kind, folder, lambda: model_of("qwen", torch.bfloat16), **options)


@compat(ROW, "single", "stand_in")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_same_bits_asleep_or_awake_and_trls_own_losses(kind: str, tmp_path: Path) -> None:
    from superoffload.integrations.transformers import offload

    ways: dict[str, dict[str, Any]] = {
        "never": {"speculation": "never"},
        "always": {"speculation": "always"},
        "asleep": {"speculation": "always", "sleep": True},
        "on disk": {"speculation": "always", "sleep": tmp_path},
    }
    logs, digests = {}, {}
    slept: list[Any] = []
    sleep = AdamW.sleep

    def noting(self: AdamW, folder: Any = None) -> None:
        slept.append(folder)
        sleep(self, folder)

    for name, options in ways.items():
        trainer = grpo(tmp_path, kind)
        offload(trainer, threads=1, **options)
        with mock.patch.object(AdamW, "sleep", noting):
            trainer.train()
        logs[name] = [(entry["loss"], entry["grad_norm"], entry["reward"]) for entry in logs_of(trainer)]
        digests[name] = end(trainer)
    assert slept == [None] * 3 + [tmp_path] * 3, "once for each step: two micro-batches share what was generated"
    assert len(logs["never"]) == 3 and any(norm > 0.5 for _, norm, _ in logs["never"])
    for name in ("always", "asleep", "on disk"):
        assert digests[name] == digests["never"] and logs[name] == logs["never"], name
    theirs = grpo(tmp_path, kind)
    theirs.train()
    first = logs_of(theirs)[0]  # later ones are of other samples
    assert logs["never"][0] == pytest.approx((first["loss"], first["grad_norm"], first["reward"]), rel=1e-2, abs=1e-6)


def test_an_evaluation_generates_too(tmp_path: Path) -> None:
    from superoffload.integrations.transformers import offload

    trainer = grpo(tmp_path, "GRPO", max_steps=2, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=4)
    offload(trainer, threads=1, sleep=True)
    before = trainer.evaluate()
    trainer.train()
    rewards = [entry["eval_reward"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(rewards) == 2 and 0 <= before["eval_reward"] <= 1
    end(trainer)


def test_an_error_while_it_generates_leaves_the_optimizer_awake(tmp_path: Path) -> None:
    from superoffload.integrations.transformers import offload

    trainer = grpo(tmp_path, "GRPO")
    trainer._generate = mock.Mock(side_effect=RuntimeError("no room"))
    offload(trainer, threads=1, sleep=True)
    with pytest.raises(RuntimeError, match="no room"):
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    optimizer.refresh_masters()  # no StateError: it is awake
    optimizer.close()


def test_where_it_cannot_sleep(tmp_path: Path) -> None:
    from superoffload.integrations.transformers import offload

    with pytest.raises(ArgumentError, match=r"sleep: Trainer does not generate, .* a trainer like TRL's GRPO"):
        offload(trainer_of(tmp_path, model_of(), None), sleep=True)
    online = trainer_of(tmp_path, model_of(), None)
    online._generate = mock.Mock()  # as TRL's OnlineDPOTrainer has, which calls it in every micro-batch
    with pytest.raises(ArgumentError, match="not between two steps"):
        offload(online, sleep=True)
    with pytest.raises(ArgumentError, match=r"sleep='.*none': expected a folder that exists, or True"):
        offload(grpo(tmp_path, "GRPO"), sleep=tmp_path / "none")
    trainer = grpo(tmp_path, "GRPO", steps_per_generation=3)
    with pytest.raises(ArgumentError, match=r"sleep: it generates every 3 micro-batches .* a multiple of .*, 2"):
        offload(trainer, sleep=True)
    offload(trainer, sleep=None)  # awake, it works

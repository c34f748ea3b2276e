"""TRL's trainers that generate: offload(trainer) trains as torch's AdamW, and the optimizer may sleep meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload import AdamW
from superoffload.errors import ArgumentError
from tests.support.hugging_face import NEEDS, end, logs_of, model_of, tokenizer_of, trainer_of, transformers
from tests.support.optional_packages import needs

pytestmark = [pytest.mark.skipif(transformers is None, reason=NEEDS), needs("trl", "datasets")]

BASIC: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 6,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.5,
    "beta": 0.0,  # else RLOO looks for the reference model on a hub
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
    "gradient_checkpointing": False,
    "optim": "adamw_torch",
}


def even_tokens(completion_ids: Sequence[Sequence[int]], **others: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def grpo(folder: Path, kind: str, **options: Any) -> Any:
    import datasets
    import trl

    config, trainer = {"GRPO": (trl.GRPOConfig, trl.GRPOTrainer), "RLOO": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    prompts = datasets.Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(2, 60)]})
    torch.manual_seed(1)
    return trainer(
        model=model_of("qwen", torch.bfloat16),
        reward_funcs=even_tokens,
        args=config(output_dir=str(folder), **{**BASIC, **options}),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=tokenizer_of(),
    )


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

    with pytest.raises(ArgumentError, match=r"sleep: Trainer does not generate; expected a trainer like TRL's GRPO"):
        offload(trainer_of(tmp_path, model_of(), None), sleep=True)
    trainer = grpo(tmp_path, "GRPO", steps_per_generation=3)
    with pytest.raises(ArgumentError, match=r"sleep: it generates every 3 micro-batches .* a multiple of .*, 2"):
        offload(trainer, sleep=True)
    offload(trainer)  # awake, it works

"""Frameworks that bring their own loop, under DeepSpeed ZeRO-3: Lightning, TRL, and Trainer's best model at the end."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support.compatibility import Refusal, compat
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.training import config, end, masters
from tests.support.optional_packages import needs


@compat(
    "Lightning: automatic and manual optimization",
    "deepspeed",
    refused="The DeepSpeed strategy is only supported on CUDA GPUs",
    note="by Lightning, where there is none",
)
def test_lightning(refusal: Refusal, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
    from lightning.pytorch.demos.boring_classes import BoringModel

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    with mock.patch.dict(os.environ):  # Lightning says there which rank this is; later tests must not think so
        trainer = lightning.Trainer(strategy="deepspeed_stage_3", accelerator="cpu", **options)
        with refusal():
            trainer.fit(BoringModel())


def trained_by_trl(kind: str, folder: str, options: dict[str, Any]) -> tuple[Any, list[float]]:
    """``kind``: "SFT", or a trainer that generates."""
    from accelerate.state import AcceleratorState

    import superoffload.integrations.deepspeed as ours
    from tests.support.hugging_face import logs_of, model_of
    from tests.support.trl_trainers import generating, sft

    ours.enable()
    AcceleratorState._reset_state(reset_partial_state=True)
    make, clip, accumulation = (sft, 1.0, 1) if kind == "SFT" else (partial(generating, kind), 0.5, 2)
    trainer = make(
        folder,
        model_of,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        max_grad_norm=clip,
        deepspeed=config(precision="fp32", clip=clip, accumulation=accumulation, options=options),
    )
    trainer.train()
    engine = trainer.model_wrapped
    found = (engine.optimizer.state_digests(), [entry["loss"] for entry in logs_of(trainer)])
    end(engine)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


@compat("TRL's SFTTrainer", "deepspeed")
@needs("trl", "datasets")
def test_sft_trainer(two_ranks: Ranks, tmp_path: Path) -> None:
    always, never = (
        two_ranks.run(trained_by_trl, "SFT", str(tmp_path), {"speculation": mode}) for mode in ("always", "never")
    )
    assert always == never
    for _, losses in always:
        assert losses[-1] < losses[0]


@compat("TRL's GRPOTrainer and RLOOTrainer", "deepspeed")
@needs("trl", "datasets")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trainers_that_generate(two_ranks: Ranks, kind: str, tmp_path: Path) -> None:
    always, never = (
        two_ranks.run(trained_by_trl, kind, str(tmp_path), {"speculation": mode}) for mode in ("always", "never")
    )
    assert always == never
    for _, losses in always:
        assert len(set(losses)) > 1


def best_model(folder: str) -> tuple[str, bool, bool, bool]:
    """The best checkpoint is not the last one here. What is loaded at the end: masters and parameters of the best?"""
    import transformers
    from accelerate.state import AcceleratorState
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    import superoffload.integrations.deepspeed as ours
    from tests.support.hugging_face import Counting, model_of

    ours.enable()
    AcceleratorState._reset_state(reset_partial_state=True)
    args = transformers.TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, learning_rate=3e-3, max_grad_norm=1.0,
        weight_decay=0.1, eval_strategy="steps", eval_steps=2, save_steps=2, load_best_model_at_end=True,
        report_to="none",
        metric_for_best_model="eval_loss", greater_is_better=True, use_cpu=True, disable_tqdm=True, seed=3,
        deepspeed=config(clip=1.0, options={"speculation": "always", "delivery": "on_demand"}), bf16=True,
    )  # fmt: skip
    held_out = torch.utils.data.Subset(Counting(), range(4))
    trainer = transformers.Trainer(model=model_of(), args=args, train_dataset=Counting(), eval_dataset=held_out)
    trainer.train()
    engine = trainer.model_wrapped
    best, last = (get_fp32_state_dict_from_zero_checkpoint(f"{folder}/checkpoint-{step}") for step in (2, 4))
    found = masters(engine)
    with deepspeed_gathered(engine.module):
        published = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    end(engine)
    AcceleratorState._reset_state(reset_partial_state=True)
    return (
        Path(trainer.state.best_model_checkpoint).name,
        all(torch.equal(value, best[name].float()) for name, value in found.items()),
        all(torch.equal(value, best[name].to(value.dtype)) for name, value in published.items()),
        any(not torch.equal(value, last[name].float()) for name, value in found.items()),
    )


def deepspeed_gathered(module: nn.Module) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(module.parameters()))


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="needs transformers and accelerate: pip install 'superoffload[transformers]'",
)
def test_trainer_loads_the_best_model_at_the_end(two_ranks: Ranks, tmp_path: Path) -> None:
    for found in two_ranks.run(best_model, str(tmp_path)):
        assert found == ("checkpoint-2", True, True, True)

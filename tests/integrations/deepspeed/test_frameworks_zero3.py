"""Frameworks that bring their own loop, under DeepSpeed ZeRO-3: Lightning and TRL."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.training import config, end
from tests.support.optional_packages import needs
from tests.support.refusal import Refusal


@pytest.mark.refused("The DeepSpeed strategy is only supported on CUDA GPUs")
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


@needs("trl", "datasets")
@pytest.mark.parametrize(
    "kind",
    ["SFT", "GRPO"],
)
def test_trl(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    always, never = (
        two_ranks.run(trained_by_trl, kind, str(tmp_path), {"speculation": mode}) for mode in ("always", "never")
    )
    assert always == never
    for _, losses in always:
        assert len(set(losses)) > 1
        assert kind != "SFT" or losses[-1] < losses[0]

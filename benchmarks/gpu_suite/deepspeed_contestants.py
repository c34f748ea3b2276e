"""Runs DeepSpeed's own CPU offload, as its documentation configures it: ZeRO-Offload (stages 2, 3) and SuperOffload."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.devices import be_a_rank
from benchmarks.gpu_suite.settings import BETAS, EPS, LR, NEVER_CLIPS, WEIGHT_DECAY, TrainRow
from benchmarks.training.model import Transformer

OFF = 0.0  # DeepSpeed's "no clipping"


class DeepSpeed:
    """Trains on one rank in bf16, with AdamW on the CPU."""

    def __init__(self, model: Transformer, row: TrainRow, config: dict[str, Any]) -> None:
        prepare_environment(row.device)
        import deepspeed

        deepspeed.init_distributed("nccl" if row.device.startswith("cuda") else "gloo")
        self.micro_batches = row.micro_batches
        self.engine, *_ = deepspeed.initialize(model=_with_loss(model), config=config)

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        for tokens in micro_batches:
            loss = self.engine(tokens)
            self.engine.backward(loss)
            self.engine.step()
            share = loss.detach() / self.micro_batches
            total = share if total is None else total + share
        assert total is not None
        return total

    def settle(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"deepspeed": version("deepspeed"), "optimizer": type(self.engine.optimizer).__name__}

    def close(self) -> None:
        self.engine.destroy()


def _with_loss(model: Transformer) -> torch.nn.Module:
    """Makes forward the loss, since DeepSpeed's engine calls forward."""

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model.loss(tokens)

    return Loss()


def prepare_environment(device: str) -> None:
    """Sets up a single rank unless a launcher did, and finds the kernels' compilers next to this Python."""
    be_a_rank()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.startswith("cuda") else "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def config_for(row: TrainRow, stage: int, clipping: float, *, super_offload: bool = False) -> dict[str, Any]:
    """Returns DeepSpeed's configuration; ``super_offload`` needs stage 3."""
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": row.device.startswith("cuda")}
    if super_offload:
        offload["super_offload"] = True
    return {
        "train_micro_batch_size_per_gpu": row.batch,
        "gradient_accumulation_steps": row.micro_batches,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": offload,
            "overlap_comm": False if super_offload else stage == 3,
            "contiguous_gradients": True,
            # Several sub-groups: with one, nothing could be stepped before backward has ended.
            **({"sub_group_size": 100_000_000} if stage == 3 else {}),
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        },
        "steps_per_print": 10**9,
    }


def superoffload(model: Transformer, row: TrainRow) -> DeepSpeed:
    return DeepSpeed(model, row, config_for(row, 3, OFF, super_offload=True))


def superoffload_clipping(model: Transformer, row: TrainRow) -> DeepSpeed:
    return DeepSpeed(model, row, config_for(row, 3, NEVER_CLIPS, super_offload=True))


def zero_offload(model: Transformer, row: TrainRow) -> DeepSpeed:
    return DeepSpeed(model, row, config_for(row, 2, NEVER_CLIPS))


def zero3_offload(model: Transformer, row: TrainRow) -> DeepSpeed:
    return DeepSpeed(model, row, config_for(row, 3, NEVER_CLIPS))

"""Trains the published setting with ours and with what it is compared with, all sharded over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gh200.setting import BETAS, LR, MAX_GRAD_NORM, WEIGHT_DECAY, Run
from benchmarks.training.model import Transformer

HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": WEIGHT_DECAY}


class Engine(Protocol):
    def step(self, tokens: Tensor, lr: float) -> Tensor:
        """Trains one step on [batch, sequence + 1] tokens; returns this rank's loss without waiting for it."""

    def close(self) -> dict[str, Any]:
        """Ends training; returns facts about the run."""


@dataclass(frozen=True)
class Entry:
    text: str
    make: Callable[[Run, torch.device], Engine]
    package: str | None = None
    needs_gpu: bool = False

    def absent(self, device: str) -> str | None:
        if self.needs_gpu and not device.startswith("cuda"):
            return "needs a GPU"
        return f"{self.package} is not installed" if self.package and find_spec(self.package) is None else None


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(run: Run, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Builds the model on the device in ``dtype``: in fp32 first, the largest models would not fit."""
    torch.manual_seed(run.seed)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device, default_dtype(dtype):
        return Transformer(run.model, compute)


class Fsdp2:
    """Applies fully_shard to every block, with gradients reduced in fp32; a subclass brings the optimizer."""

    dtype = torch.bfloat16

    def __init__(self, run: Run, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options = {"mp_policy": policy, "mesh": init_device_mesh(device.type, (run.ranks,)), **self.options()}
        self.model: Any = build(run, device, self.dtype)
        for block in self.model.blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.optimizer = self.make_optimizer()

    def options(self) -> dict[str, Any]:
        return {}

    def make_optimizer(self) -> Any:
        """Returns torch's AdamW: fp32 parameters, with state and step on their device."""
        return torch.optim.AdamW(self.model.parameters(), **HYPER, fused=True)

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()

    def close(self) -> dict[str, Any]:
        return {}


class Ours(Fsdp2):
    """Trains with superoffload.AdamW on bf16 parameters; it clips by itself."""

    def make_optimizer(self) -> Any:
        from superoffload import AdamW

        return AdamW(self.model.parameters(), **HYPER, max_grad_norm=MAX_GRAD_NORM, model=self.model)

    def update(self) -> None:
        self.optimizer.step()

    def close(self) -> dict[str, Any]:
        self.optimizer.synchronize()
        found = {"stats": self.optimizer.stats()}
        self.optimizer.close()
        return found


class OnDevice(Fsdp2):
    """Keeps fp32 parameters, cast to bf16 for compute, and moments on the GPU (ZeRO stage 3 without offload)."""

    dtype = torch.float32


class CpuOffload(OnDevice):
    """Uses FSDP2's own offload: parameters, gradients and state in host memory, stepped after backward."""

    def options(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy(pin_memory=True)}


class DeepSpeed:
    """Uses ZeRO-3 with optimizer offload; SuperOffload if asked for, which steps in backward only without clipping."""

    def __init__(self, run: Run, device: torch.device, *, super_offload: bool) -> None:
        from benchmarks.gpu_suite.deepspeed_contestants import prepare_environment

        prepare_environment(device.type)
        import deepspeed

        deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
        self.engine, *_ = deepspeed.initialize(
            model=_WithLoss(build(run, device, torch.bfloat16)), config=_deepspeed_config(run, device, super_offload)
        )

    def step(self, tokens: Tensor, lr: float) -> Tensor:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        loss: Tensor = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {"deepspeed": version("deepspeed"), "optimizer": type(self.engine.optimizer).__name__}


class _WithLoss(nn.Module):
    """Makes forward the loss, since DeepSpeed's engine calls forward."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def _deepspeed_config(run: Run, device: torch.device, super_offload: bool) -> dict[str, Any]:
    offload: dict[str, Any] = {"device": "cpu", "pin_memory": device.type == "cuda"}
    if super_offload:
        offload["super_offload"] = True
    return {
        "train_micro_batch_size_per_gpu": run.batch,
        "gradient_clipping": 0.0 if super_offload else MAX_GRAD_NORM,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": 100_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}},
        "steps_per_print": 10**9,
    }


ENGINES: dict[str, Entry] = {
    "ours": Entry("superoffload.AdamW under FSDP2, clipping on", Ours),
    "on the GPU": Entry("FSDP2, torch.optim.AdamW(fused=True), clipping on", OnDevice),
    "SuperOffload": Entry(
        "DeepSpeed SuperOffload, gradient clipping off",
        lambda run, device: DeepSpeed(run, device, super_offload=True),
        "deepspeed",
        needs_gpu=True,
    ),
    "ZeRO-Offload": Entry(
        "DeepSpeed ZeRO-3 offload, clipping on",
        lambda run, device: DeepSpeed(run, device, super_offload=False),
        "deepspeed",
    ),
    "FSDP2 offload": Entry("FSDP2's CPUOffloadPolicy, torch's fused AdamW, clipping on", CpuOffload, needs_gpu=True),
}


def engines_for(names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(name for name in ENGINES if names is None or name in names)


def local_device(device: str) -> torch.device:
    """Returns this rank's own device."""
    if device == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
        return found
    return torch.device("cpu")

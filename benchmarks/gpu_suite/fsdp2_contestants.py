"""Runs FSDP2: ours on its sharded parameters, torch's optimizer on the device, and FSDP2's own offload."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_suite.contestants import HYPER, Ours, Plain, Setting
from benchmarks.gpu_suite.devices import be_a_rank
from benchmarks.gpu_suite.settings import NEVER_CLIPS, TrainRow
from benchmarks.training.model import Transformer


def shard(model: Transformer, row: TrainRow, **options: Any) -> Any:
    """Applies fully_shard to every block and to the model; bf16 parameters, gradients reduced in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    be_a_rank()
    cuda = row.device.startswith("cuda")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {"mp_policy": policy, "mesh": init_device_mesh("cuda" if cuda else "cpu", (row.ranks,)), **options}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class OursSharded(Ours):
    def __init__(self, model: Transformer, row: TrainRow) -> None:
        super().__init__(shard(model, row), row, Setting())

    def close(self) -> None:
        super().close()
        leave()


class OnDevice(Plain):
    """Keeps fp32 parameters, cast to bf16 for compute, and moments on the device."""

    def __init__(self, model: Transformer, row: TrainRow) -> None:
        super().__init__(shard(model.float(), row, **self.options(row)), row)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **HYPER, fused=True)

    def options(self, row: TrainRow) -> dict[str, Any]:
        return {}

    def optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), NEVER_CLIPS)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        leave()


class Offload(OnDevice):
    """Uses CPUOffloadPolicy: fp32 parameters, gradients and state in host memory, stepped after backward."""

    def options(self, row: TrainRow) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy

        return {"offload_policy": CPUOffloadPolicy(pin_memory=row.device.startswith("cuda"))}


ours, on_device, offload = OursSharded, OnDevice, Offload

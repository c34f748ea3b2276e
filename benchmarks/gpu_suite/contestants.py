"""Defines the contestants: each trains the same model on the same batches its own way.

A contestant is made from a model on the device and the row; ``step(micro_batches)`` runs one whole training step and
returns its mean loss as a tensor on the device, without waiting for it.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu_suite.settings import ALWAYS_CLIPS, BETAS, EPS, LR, NEVER_CLIPS, WEIGHT_DECAY, TrainRow
from benchmarks.training.model import Transformer

FILES_VARIABLE = "GPU_SUITE_FILES"  # in the environment: folder for files that belong to the results
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


class Contestant(Protocol):
    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Runs forward and backward of every micro-batch and the optimizer's step; returns the mean loss."""

    def settle(self) -> None:
        """Returns once nothing runs on the CPU either."""

    def counters(self) -> dict[str, float]:
        """Returns totals so far; a row reports what the timed steps added."""

    def facts(self) -> dict[str, Any]:
        """Returns facts about the contestant after the run."""

    def close(self) -> None: ...


Make = Callable[[Transformer, TrainRow], Contestant]


@dataclass(frozen=True)
class Entry:
    """Names a contestant. ``kind``: bound (of what is possible), ours or peer. ``make`` may be "module:function"."""

    kind: str
    text: str
    make: Make | str
    package: str | None = None
    needs_gpu: bool = False

    def absent(self, device: str) -> str | None:
        """Returns why the contestant need not be tried here; loads nothing."""
        if self.needs_gpu and not device.startswith("cuda"):
            return "needs a GPU"
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None

    def import_error(self) -> str | None:
        """Loads its package, and returns what went wrong."""
        try:
            if self.package is not None:
                import_module(self.package)
        except Exception as error:  # any error of a package that is not ours
            return f"{self.package} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None

    def build(self, model: Transformer, row: TrainRow) -> Contestant:
        if isinstance(self.make, str):
            module, _, function = self.make.partition(":")
            make: Make = getattr(import_module(module), function)
            return make(model, row)
        return self.make(model, row)


class Plain:
    """Runs forward and backward only, from which an optimizer's exposed time is measured."""

    def __init__(self, model: Any, row: TrainRow) -> None:
        self.model = model

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        total: Tensor | None = None
        for micro, tokens in enumerate(micro_batches):
            loss = self.backward(tokens, 1 / len(micro_batches), last=micro + 1 == len(micro_batches))
            total = loss if total is None else total + loss
        self.optimize()
        assert total is not None
        return total

    def backward(self, tokens: Tensor, share: float, *, last: bool) -> Tensor:
        loss: Tensor = self.model.loss(tokens) * share
        loss.backward()
        return loss.detach()

    def optimize(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def settle(self) -> None: ...

    def counters(self) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class AllOnDevice(Plain):
    """Steps fp32 masters and moments beside the bf16 parameters by torch: the same job, nothing moved."""

    def __init__(self, model: Transformer, row: TrainRow) -> None:
        super().__init__(model, row)
        self.parameters = list(model.parameters())
        self.masters = [param.detach().float() for param in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, **HYPER, fused=True)

    @torch.no_grad()
    def optimize(self) -> None:
        for param, master in zip(self.parameters, self.masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None  # before the next one is converted
        torch.nn.utils.clip_grad_norm_(self.masters, NEVER_CLIPS)
        self.optimizer.step()
        self.optimizer.zero_grad()
        targets: list[Tensor] = list(self.parameters)
        torch._foreach_copy_(targets, self.masters)


@dataclass(frozen=True)
class Setting:
    """Holds how our rows differ. ``clipped``: the part of the steps whose gradients are clipped, evenly spread."""

    clipped: float = 0.0
    speculation: str = "adaptive"
    delivery: str = "on_demand"
    threads: int | None = None
    placement: Any = None
    traced: bool = False
    state_dtype: str = "fp32"
    master_dtype: str = "fp32"

    def threshold(self, step: int) -> float:
        """Returns the threshold of ``step``, which counts from 0."""
        return ALWAYS_CLIPS if int((step + 1) * self.clipped) > int(step * self.clipped) else NEVER_CLIPS


class Ours(Plain):
    """Trains with superoffload.AdamW."""

    def __init__(self, model: Any, row: TrainRow, setting: Setting) -> None:
        super().__init__(model, row)
        self.compares = not row.device.startswith("cuda")
        self.setting, self.steps = setting, 0
        self.trace = timeline_path() if setting.traced else None
        self.optimizer: Any = self.make_optimizer(model)

    def make_optimizer(self, model: Any) -> Any:
        from superoffload import AdamW

        setting = self.setting
        whose = {"module" if setting.delivery == "on_demand" else "model": model}
        return AdamW(
            model.parameters(), **HYPER, max_grad_norm=setting.threshold(0), speculation=setting.speculation,
            delivery=setting.delivery, threads=setting.threads, placement=setting.placement, trace=self.trace,
            state_dtype=setting.state_dtype, master_dtype=setting.master_dtype, **whose,
        )  # fmt: skip

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        self.optimizer.max_grad_norm = self.setting.threshold(self.steps)
        self.steps += 1
        return super().step(micro_batches)

    def backward(self, tokens: Tensor, share: float, *, last: bool) -> Tensor:
        if last:
            return super().backward(tokens, share, last=last)
        with self.optimizer.accumulate():
            return super().backward(tokens, share, last=last)

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settle(self) -> None:
        self.optimizer.synchronize()

    def counters(self) -> dict[str, float]:
        return dict(self.optimizer.stats())

    def facts(self) -> dict[str, Any]:
        """Returns the statistics, which show the clip rate that was reached, what the schedule has measured, the link's
        facts, and perhaps digests.

        Digests need gradients that are the same in every run: on a GPU attention's backward adds in any order, and the
        races compare bits instead, with deterministic kernels.
        """
        digests = {"digests": self.optimizer.state_digests()} if self.compares else {}
        link = self.optimizer._engine.link
        facts = {name: getattr(link, name, None) for name in ("pinned", "uses_flag")}
        return {"stats": self.optimizer.stats(), "measured": self.measured(), "link": facts, **digests}

    def measured(self) -> dict[str, float]:
        """Returns seconds of the last steps: forward, backward, and each operation per parameter."""
        times = self.optimizer._engine.schedule.times
        operations = {operation.name: times.seconds(operation, 1) for operation in times.operations}
        return {"forward": times.forward, "backward": times.backward, **operations} if operations else {}

    def close(self) -> None:
        self.optimizer.close()
        if self.trace is not None:
            compress(self.trace)


def timeline_path() -> str:
    """Returns a path in the folder that the suite's caller gets back, or in the current one."""
    return str(Path(os.environ.get(FILES_VARIABLE, "."), "timeline.json"))


def compress(path: str) -> None:
    """Replaces the file by PATH.gz, which Perfetto opens as it is."""
    with open(path, "rb") as source, gzip.open(f"{path}.gz", "wb") as target:
        shutil.copyfileobj(source, target)
    os.unlink(path)


class TorchAo(Plain):
    """Runs torchao's CPUOffloadOptimizer, which steps after backward without clips; its state has the dtype bf16."""

    def __init__(self, model: Transformer, row: TrainRow) -> None:
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(model, row)
        # Gradients can be freed early only without accumulation.
        frees = row.micro_batches == 1
        self.optimizer: Any = CPUOffloadOptimizer(
            list(model.parameters()), torch.optim.AdamW, offload_gradients=frees, fused=True, **HYPER
        )

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(**setting: Any) -> Make:
    return lambda model, row: Ours(model, row, Setting(**setting))


BARE, ALL_ON_DEVICE = "forward and backward only", "all on the device"
OURS, OURS_CLIPPED, OURS_SYNCHRONOUS = "ours", "ours, every step clipped", "ours, synchronous"
OURS_BF16, OURS_LEAN = "ours, bf16 state", "ours, bf16 state, split masters"
ZERO3_OFFLOAD = "DeepSpeed ZeRO-3 offload"
SUPEROFFLOAD, TORCHAO = "DeepSpeed SuperOffload", "torchao CPUOffloadOptimizer"
ZERO_OFFLOAD = "DeepSpeed ZeRO-Offload"
FSDP2_OFFLOAD, FSDP2_ON_DEVICE = "FSDP2 CPU offload", "FSDP2, all on the device"
OURS_FSDP2 = "ours, FSDP2"
THREADS = (8, 12, 14, 16)
_DEEPSPEED = "benchmarks.gpu_suite.deepspeed_contestants:"
_FSDP2 = "benchmarks.gpu_suite.fsdp2_contestants:"
_NO_CLIPPING = "clipping on, never triggered"

CONTESTANTS: dict[str, Entry] = {
    BARE: Entry("bound", "no optimizer", Plain),
    ALL_ON_DEVICE: Entry("bound", "torch.optim.AdamW(fused=True) on fp32 masters", AllOnDevice),
    OURS: Entry("ours", f'delivery="on_demand", {_NO_CLIPPING}', ours()),
    OURS_CLIPPED: Entry("ours", "clipping at every step", ours(clipped=1.0)),
    "ours, 10 % clipped": Entry("ours", "clipping at every tenth step", ours(clipped=0.1)),
    "ours, 50 % clipped": Entry("ours", "clipping at every second step", ours(clipped=0.5)),
    "ours, eager": Entry("ours", 'delivery="eager"', ours(delivery="eager")),
    "ours, eager, every step clipped": Entry("ours", 'delivery="eager"', ours(clipped=1.0, delivery="eager")),
    OURS_SYNCHRONOUS: Entry("ours", 'speculation="never"', ours(speculation="never")),
    **{f"ours, {threads} threads": Entry("ours", f"threads={threads}", ours(threads=threads)) for threads in THREADS},
    "ours, placement auto": Entry("ours", 'placement="auto"', ours(placement="auto"), needs_gpu=True),
    "ours, placement 10 %": Entry(
        "ours", "placement={'gpu_fraction': 0.1}", ours(placement={"gpu_fraction": 0.1}), needs_gpu=True
    ),
    OURS_BF16: Entry("ours", 'state_dtype="bf16", as torchao has it', ours(state_dtype="bf16")),
    OURS_LEAN: Entry("ours", 'bf16 state, master_dtype="split"', ours(state_dtype="bf16", master_dtype="split")),
    "ours, lean, every step clipped": Entry(
        "ours", 'bf16 state, master_dtype="split"', ours(clipped=1.0, state_dtype="bf16", master_dtype="split")
    ),
    "ours, 8-bit state, split masters": Entry(
        "ours", 'state_dtype="8bit", master_dtype="split"', ours(state_dtype="8bit", master_dtype="split")
    ),
    "ours, traced": Entry("ours", "trace=: writes timeline.json.gz", ours(traced=True)),
    OURS_FSDP2: Entry("ours", "fully_shard", _FSDP2 + "ours"),
    SUPEROFFLOAD: Entry("peer", "gradient_clipping off", _DEEPSPEED + "superoffload", "deepspeed", needs_gpu=True),
    TORCHAO: Entry("peer", "no clipping, bf16 state", TorchAo, "torchao", needs_gpu=True),
    "DeepSpeed SuperOffload, clipping": Entry(
        "peer", f"gradient_{_NO_CLIPPING}", _DEEPSPEED + "superoffload_clipping", "deepspeed", needs_gpu=True
    ),
    ZERO_OFFLOAD: Entry("peer", f"stage 2, {_NO_CLIPPING}", _DEEPSPEED + "zero_offload", "deepspeed"),
    ZERO3_OFFLOAD: Entry("peer", f"stage 3, {_NO_CLIPPING}", _DEEPSPEED + "zero3_offload", "deepspeed"),
    FSDP2_ON_DEVICE: Entry("bound", "fp32 parameters, torch.optim.AdamW(fused=True)", _FSDP2 + "on_device"),
    FSDP2_OFFLOAD: Entry("peer", f"CPUOffloadPolicy, {_NO_CLIPPING}", _FSDP2 + "offload"),
}

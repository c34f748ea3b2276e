"""Defines the contestants: each trains the same model on the same batches its own way.

A contestant is made from a model on the device and the row; ``step(micro_batches)`` runs one whole training step and
returns its mean loss as a tensor on the device, without waiting for it.
"""

from __future__ import annotations

import gzip
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu_suite.settings import ALWAYS_CLIPS, BETAS, EPS, LR, NEVER_CLIPS, WEIGHT_DECAY, TrainRow
from benchmarks.training.model import Transformer
from superoffload import AdamW

FILES_VARIABLE = "GPU_SUITE_FILES"  # in the environment: folder for files that belong to the results
HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


@dataclass(frozen=True)
class Entry:
    """Names a contestant. ``kind``: bound (of what is possible), ours or peer."""

    kind: str
    text: str
    make: Callable[[Any, TrainRow], Plain]
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


class Plain:
    """Runs forward and backward only, from which an optimizer's exposed time is measured; others differ in parts."""

    def __init__(self, model: Any, row: TrainRow) -> None:
        self.model = model

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Runs forward and backward of every micro-batch and the optimizer's step; returns the mean loss."""
        count = len(micro_batches)
        losses = [self.backward(each, 1 / count, last=at + 1 == count) for at, each in enumerate(micro_batches)]
        self.optimize()
        return torch.stack(losses).sum()

    def backward(self, tokens: Tensor, share: float, *, last: bool) -> Tensor:
        loss: Tensor = self.model.loss(tokens) * share
        loss.backward()
        return loss.detach()

    def optimize(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def settle(self) -> None:
        """Returns once nothing runs on the CPU either."""

    def counters(self) -> dict[str, float]:
        """Returns totals so far; a row reports what the timed steps added."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Returns facts about the contestant after the run."""
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
        self.trace = str(Path(os.environ.get(FILES_VARIABLE, "."), "timeline.json")) if setting.traced else None
        whose = {"module" if setting.delivery == "on_demand" else "model": model}
        self.optimizer: Any = AdamW(
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
        times = self.optimizer._engine.schedule.times  # of the last steps; an operation's per parameter
        measured = {operation.name: times.seconds(operation, 1) for operation in times.operations}
        measured |= {"forward": times.forward, "backward": times.backward} if measured else {}
        return {"stats": self.optimizer.stats(), "measured": measured, "link": facts, **digests}

    def close(self) -> None:
        self.optimizer.close()
        if self.trace is not None:
            with open(self.trace, "rb") as source, gzip.open(f"{self.trace}.gz", "wb") as target:
                shutil.copyfileobj(source, target)  # Perfetto opens it as it is
            os.unlink(self.trace)


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


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def be_a_rank() -> None:
    """Makes this process the only rank, unless a launcher set its rank."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


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


class OursSharded(Ours):
    def __init__(self, model: Transformer, row: TrainRow) -> None:
        super().__init__(shard(model, row), row, Setting())

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


class Fsdp2(Plain):
    """Keeps fp32 parameters, cast to bf16 for compute, and moments on the device; or, with ``offload``, parameters,
    gradients and state in host memory, stepped after backward."""

    def __init__(self, model: Transformer, row: TrainRow, *, offload: bool) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy

        options = {"offload_policy": CPUOffloadPolicy(pin_memory=row.device.startswith("cuda"))} if offload else {}
        super().__init__(shard(model.float(), row, **options), row)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **HYPER, fused=True)

    def optimize(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), NEVER_CLIPS)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        dist.destroy_process_group()


# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


class DeepSpeed(Plain):
    """Trains on one rank in bf16, with AdamW on the CPU, as its documentation configures ZeRO-Offload (``stage`` 2, 3)
    and SuperOffload (``superoffload``, stage 3). ``clipping`` 0 is none."""

    device = "cpu"

    def __init__(
        self,
        model: Transformer,
        row: TrainRow,
        *,
        stage: int,
        clipping: float,
        superoffload: bool = False,
        offload_param: bool = False,
    ) -> None:
        super().__init__(model, row)
        prepare_deepspeed(row.device)
        import deepspeed

        deepspeed.init_distributed("nccl" if row.device.startswith("cuda") else "gloo")
        pin = row.device.startswith("cuda")
        offload: dict[str, Any] = {"device": self.device, "pin_memory": pin}
        config = {
            "train_micro_batch_size_per_gpu": row.batch,
            "gradient_accumulation_steps": row.micro_batches,
            "gradient_clipping": clipping,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": stage,
                "offload_optimizer": {**offload, **({"super_offload": True} if superoffload else {})},
                "overlap_comm": stage == 3 and not superoffload,
                "contiguous_gradients": True,
                # Several sub-groups: with one, nothing could be stepped before backward has ended.
                **({"sub_group_size": 100_000_000} if stage == 3 else {}),
                **({"offload_param": {"device": "cpu", "pin_memory": pin}} if offload_param else {}),
            },
            "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(BETAS)}},
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=Loss(model), config=config)

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        losses = []
        for tokens in micro_batches:
            loss = self.engine(tokens)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach() / len(micro_batches))
        return torch.stack(losses).sum()

    def facts(self) -> dict[str, Any]:
        return {"deepspeed": version("deepspeed"), "optimizer": type(self.engine.optimizer).__name__}

    def close(self) -> None:
        self.engine.destroy()


class OursUnderDeepSpeed(DeepSpeed):
    """Trains by our adapter in the same configuration; nothing else of it differs from DeepSpeed's."""

    device = "superoffload"

    def __init__(self, model: Transformer, row: TrainRow, **options: Any) -> None:
        prepare_deepspeed(row.device)
        from superoffload.integrations.deepspeed import enable

        enable()
        super().__init__(model, row, **options)

    def settle(self) -> None:
        self.engine.optimizer.synchronize()

    def counters(self) -> dict[str, float]:
        return dict(self.engine.optimizer.stats())

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "stats": self.engine.optimizer.stats()}


class Loss(torch.nn.Module):
    """Makes forward the loss, since DeepSpeed's engine calls forward."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens)


def prepare_deepspeed(device: str) -> None:
    """Sets up a single rank unless a launcher did, and finds the kernels' compilers next to this Python."""
    be_a_rank()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.startswith("cuda") else "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


# ---- the list --------------------------------------------------------------------------------------------------------


def ours(text: str, **setting: Any) -> Entry:
    """``placement`` needs a GPU's memory."""
    needs_gpu = "placement" in setting
    return Entry("ours", text, lambda model, row: Ours(model, row, Setting(**setting)), needs_gpu=needs_gpu)


def ours_under_deepspeed(text: str, **options: Any) -> Entry:
    """Only stage 2 is tried without a GPU: DeepSpeed takes long to load."""
    make = partial(OursUnderDeepSpeed, clipping=NEVER_CLIPS, **options)
    return Entry("ours", f"{text}, {_NO_CLIPPING}", make, "deepspeed", needs_gpu=options["stage"] == 3)


def deepspeed_entry(text: str, **options: Any) -> Entry:
    return Entry("peer", text, partial(DeepSpeed, **options), "deepspeed", needs_gpu="superoffload" in options)


BARE, ALL_ON_DEVICE = "forward and backward only", "all on the device"
OURS, OURS_CLIPPED, OURS_SYNCHRONOUS = "ours", "ours, every step clipped", "ours, synchronous"
OURS_BF16, OURS_LEAN = "ours, bf16 state", "ours, bf16 state, split masters"
ZERO3_OFFLOAD = "DeepSpeed ZeRO-3 offload"
SUPEROFFLOAD, TORCHAO = "DeepSpeed SuperOffload", "torchao CPUOffloadOptimizer"
ZERO_OFFLOAD = "DeepSpeed ZeRO-Offload"
FSDP2_OFFLOAD, FSDP2_ON_DEVICE = "FSDP2 CPU offload", "FSDP2, all on the device"
OURS_FSDP2 = "ours, FSDP2"
OURS_ZERO2, OURS_ZERO3 = "ours, DeepSpeed ZeRO-2", "ours, DeepSpeed ZeRO-3"
OURS_ZERO3_OFFLOADED = "ours, DeepSpeed ZeRO-3, parameters offloaded"
THREADS = (8, 12, 14, 16)
_LEAN: dict[str, Any] = {"state_dtype": "bf16", "master_dtype": "split"}
_NO_CLIPPING = "clipping on, never triggered"

CONTESTANTS: dict[str, Entry] = {
    BARE: Entry("bound", "no optimizer", Plain),
    ALL_ON_DEVICE: Entry("bound", "torch.optim.AdamW(fused=True) on fp32 masters", AllOnDevice),
    OURS: ours(f'delivery="on_demand", {_NO_CLIPPING}'),
    OURS_CLIPPED: ours("clipping at every step", clipped=1.0),
    "ours, 10 % clipped": ours("clipping at every tenth step", clipped=0.1),
    "ours, 50 % clipped": ours("clipping at every second step", clipped=0.5),
    "ours, eager": ours('delivery="eager"', delivery="eager"),
    "ours, eager, every step clipped": ours('delivery="eager"', clipped=1.0, delivery="eager"),
    OURS_SYNCHRONOUS: ours('speculation="never"', speculation="never"),
    **{f"ours, {threads} threads": ours(f"threads={threads}", threads=threads) for threads in THREADS},
    "ours, placement auto": ours('placement="auto"', placement="auto"),
    "ours, placement 10 %": ours("placement={'gpu_fraction': 0.1}", placement={"gpu_fraction": 0.1}),
    OURS_BF16: ours('state_dtype="bf16", as torchao has it', state_dtype="bf16"),
    OURS_LEAN: ours('bf16 state, master_dtype="split"', **_LEAN),
    "ours, lean, every step clipped": ours('bf16 state, master_dtype="split"', clipped=1.0, **_LEAN),
    "ours, 8-bit state, split masters": ours('state_dtype="8bit"', state_dtype="8bit", master_dtype="split"),
    "ours, traced": ours("trace=: writes timeline.json.gz", traced=True),
    OURS_FSDP2: Entry("ours", "fully_shard", OursSharded),
    OURS_ZERO2: ours_under_deepspeed("stage 2", stage=2),
    OURS_ZERO3: ours_under_deepspeed("stage 3", stage=3),
    OURS_ZERO3_OFFLOADED: ours_under_deepspeed("stage 3 with offload_param", stage=3, offload_param=True),
    SUPEROFFLOAD: deepspeed_entry("gradient_clipping off", stage=3, clipping=0.0, superoffload=True),
    TORCHAO: Entry("peer", "no clipping, bf16 state", TorchAo, "torchao", needs_gpu=True),
    "DeepSpeed SuperOffload, clipping": deepspeed_entry(
        f"gradient_{_NO_CLIPPING}", stage=3, clipping=NEVER_CLIPS, superoffload=True
    ),
    ZERO_OFFLOAD: deepspeed_entry(f"stage 2, {_NO_CLIPPING}", stage=2, clipping=NEVER_CLIPS),
    ZERO3_OFFLOAD: deepspeed_entry(f"stage 3, {_NO_CLIPPING}", stage=3, clipping=NEVER_CLIPS),
    FSDP2_ON_DEVICE: Entry("bound", "fp32 parameters, torch.optim.AdamW(fused=True)", partial(Fsdp2, offload=False)),
    FSDP2_OFFLOAD: Entry("peer", f"CPUOffloadPolicy, {_NO_CLIPPING}", partial(Fsdp2, offload=True)),
}

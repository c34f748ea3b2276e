"""Who takes part: each trains the same model on the same batches its own way.

A contestant is made from a model on the device and the row; ``step(micro_batches)`` is one whole training step and
returns its mean loss as a tensor on the device, without waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu_suite.settings import ALWAYS_CLIPS, BETAS, EPS, LR, NEVER_CLIPS, WEIGHT_DECAY, TrainRow
from superoffload.training.model import Transformer

HYPER: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}


class Contestant(Protocol):
    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Forward and backward of every micro-batch, the optimizer's step; the mean loss."""

    def settle(self) -> None:
        """Returns once nothing runs on the CPU either."""

    def facts(self) -> dict[str, Any]:
        """What it can tell of itself after the run."""

    def close(self) -> None: ...


Make = Callable[[Transformer, TrainRow], Contestant]


@dataclass(frozen=True)
class Entry:
    """``kind``: bound (a bound of what is possible), ours or peer. ``make`` may be "module:function"."""

    kind: str
    text: str
    make: Make | str
    package: str | None = None
    needs_gpu: bool = False

    def absent(self, device: str) -> str | None:
        """Why it need not be tried here; loads nothing."""
        if self.needs_gpu and not device.startswith("cuda"):
            return "needs a GPU"
        if self.package is not None and find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return None

    def import_error(self) -> str | None:
        """Loads its package, and says what went wrong."""
        try:
            if self.package is not None:
                import_module(self.package)
        except Exception as error:  # whatever goes wrong in somebody else's package
            return f"{self.package} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None

    def build(self, model: Transformer, row: TrainRow) -> Contestant:
        if isinstance(self.make, str):
            module, _, function = self.make.partition(":")
            make: Make = getattr(import_module(module), function)
            return make(model, row)
        return self.make(model, row)


class Plain:
    """Forward and backward, and nothing else: what an optimizer's exposed time is measured from."""

    def __init__(self, model: Transformer, row: TrainRow) -> None:
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
        loss = self.model.loss(tokens) * share
        loss.backward()
        return loss.detach()

    def optimize(self) -> None:
        for param in self.model.parameters():
            param.grad = None

    def settle(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


class AllOnDevice(Plain):
    """fp32 masters and moments beside the bf16 parameters, stepped by torch: the same job, nothing moved."""

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


class Ours(Plain):
    """superoffload.AdamW."""

    def __init__(self, model: Transformer, row: TrainRow, threshold: float, speculation: str, delivery: str) -> None:
        from superoffload import AdamW

        super().__init__(model, row)
        self.compares = row.device == "cpu"
        modules: dict[str, Any] = {"module": model} if delivery == "on_demand" else {}
        self.optimizer: Any = AdamW(
            model.parameters(), **HYPER, max_grad_norm=threshold, speculation=speculation, delivery=delivery, **modules
        )

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

    def facts(self) -> dict[str, Any]:
        """A wrong clip rate would make the row a measurement of something else.

        Digests where gradients are the same in every run: on a GPU attention's backward adds in any order, and the
        races compare bits instead, with deterministic kernels.
        """
        digests = {"digests": self.optimizer.state_digests()} if self.compares else {}
        return {"stats": self.optimizer.stats(), **digests}

    def close(self) -> None:
        self.optimizer.close()


class TorchAo(Plain):
    """torchao's CPUOffloadOptimizer: steps after backward, cannot clip; its state has the parameters' dtype (bf16)."""

    def __init__(self, model: Transformer, row: TrainRow) -> None:
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(model, row)
        # Gradients can be freed early only where no micro-batches are added up.
        frees = row.micro_batches == 1
        self.optimizer: Any = CPUOffloadOptimizer(
            list(model.parameters()), torch.optim.AdamW, offload_gradients=frees, fused=True, **HYPER
        )

    def optimize(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(threshold: float, speculation: str = "adaptive", delivery: str = "eager") -> Make:
    return lambda model, row: Ours(model, row, threshold, speculation, delivery)


BARE, ALL_ON_DEVICE = "forward and backward only", "all on the device"
OURS, OURS_CLIPPED, OURS_SYNCHRONOUS = "ours", "ours, every step clipped", "ours, synchronous"
OURS_LATER = "ours, on demand"
_DEEPSPEED = "benchmarks.gpu_suite.deepspeed_contestants:"

# In the order in which they are measured: what the targets need first.
CONTESTANTS: dict[str, Entry] = {
    BARE: Entry("bound", "no optimizer", Plain),
    ALL_ON_DEVICE: Entry("bound", "torch.optim.AdamW(fused=True) on fp32 masters", AllOnDevice),
    OURS: Entry("ours", "clipping on, never triggered", ours(NEVER_CLIPS)),
    OURS_CLIPPED: Entry("ours", "clipping at every step", ours(ALWAYS_CLIPS)),
    "DeepSpeed SuperOffload": Entry(
        "peer", "gradient_clipping off", _DEEPSPEED + "superoffload", "deepspeed", needs_gpu=True
    ),
    "torchao CPUOffloadOptimizer": Entry("peer", "no clipping, bf16 state", TorchAo, "torchao", needs_gpu=True),
    "DeepSpeed SuperOffload, clipping": Entry(
        "peer", "gradient_clipping on, never triggered", _DEEPSPEED + "superoffload_clipping", "deepspeed",
        needs_gpu=True,
    ),
    "DeepSpeed ZeRO-Offload": Entry(
        "peer", "stage 2, gradient_clipping on, never triggered", _DEEPSPEED + "zero_offload", "deepspeed"
    ),
    OURS_SYNCHRONOUS: Entry("ours", 'speculation="never"', ours(NEVER_CLIPS, "never")),
    OURS_LATER: Entry("ours", 'delivery="on_demand", never triggered', ours(NEVER_CLIPS, delivery="on_demand")),
    "ours, on demand, every step clipped": Entry(
        "ours", 'delivery="on_demand", clipping at every step', ours(ALWAYS_CLIPS, delivery="on_demand")
    ),
    "DeepSpeed ZeRO-3 offload": Entry(
        "peer", "stage 3, gradient_clipping on, never triggered", _DEEPSPEED + "zero3_offload", "deepspeed"
    ),
}  # fmt: skip

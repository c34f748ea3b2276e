"""Defines the engines to compare: each trains the same model its own way. A new one is one entry in ``ENGINES``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training.model import DTYPES, Block, Transformer, build_model
from superoffload.adamw import AdamW
from superoffload.errors import ArgumentError
from superoffload.host.tensors import is_dtensor, local_of
from tests.convergence.meshes import PAIR, check_pairs
from tests.convergence.mixture import EXPERTS, put_experts
from tests.convergence.setup import Setup


@dataclass(frozen=True)
class Step:
    """Says how to train one step, and what goes wrong in it.

    ``scale``: of the loss, infinite on one rank. ``nan``: after backward one element of a gradient gets a NaN on the
    last rank. ``broken``: some rank has one of the two. ``late_norm``: max_grad_norm drops to it after backward.
    """

    micro_batches: Sequence[Tensor]
    lr: float
    max_grad_norm: float
    scale: float
    nan: bool
    last_rank: bool
    broken: bool
    late_norm: float | None


def next_token_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class BaseEngine:
    """Trains one model on this rank, by a loop as users write it. An engine inherits from it and changes what is
    different. ``ours``: the optimizer is superoffload's."""

    model: Any
    optimizer: Any
    ours = True
    replicated: str | None = None

    def __init__(self, setup: Setup, speculation: str) -> None:
        self.setup = setup
        self.inner = self.build(setup)
        self.model = self.wrap(self.inner)
        # Tests replace it to plant a reduction before the last micro-batch.
        self.reduces: Callable[[int, int], bool] = lambda micro, count: micro + 1 == count
        self.optimizer = self.make_optimizer(setup, speculation)

    def build(self, setup: Setup) -> Any:
        model = build_model(setup.model, DTYPES[setup.dtype], torch.float32, setup.seed)
        if setup.experts:
            put_experts(model, setup.experts, setup.seed)
        return model.to(setup.device)

    def wrap(self, model: Any) -> Any:
        return model

    def make_optimizer(self, setup: Setup, speculation: str) -> Any:
        named = [(name, param) for name, param in self.inner.named_parameters() if param.requires_grad]
        return AdamW(
            named, lr=setup.lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=setup.max_grad_norm,
            speculation=speculation, bucket_numel=setup.bucket_numel, threads=1, rank_check=setup.rank_check,
            delivery=setup.delivery, module=self.model, replicated=self.replicated,
        )  # fmt: skip

    def train(self, step: Step) -> tuple[float, float]:
        """Trains one step; returns the mean loss of this rank, or of all, and the norm of the gradients."""
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            group["lr"] = step.lr
        optimizer.max_grad_norm = step.max_grad_norm
        optimizer.zero_grad()
        loss = self.backward(step.micro_batches, step.scale)
        if step.nan:
            self.poison(step.last_rank)
        if step.late_norm is not None:
            optimizer.max_grad_norm = step.late_norm
        optimizer.step()
        return loss, float(optimizer.grad_norm)

    def backward(self, micro_batches: Sequence[Tensor], scale: float) -> float:
        """Runs backward of the mean loss over micro-batches and ranks, times ``scale``; returns this rank's mean."""
        losses = []
        for micro, tokens in enumerate(micro_batches):
            with self.micro_batch(self.reduces(micro, len(micro_batches))):
                loss = next_token_loss(self.model, tokens)
                (loss * (scale / len(micro_batches))).backward()
                losses.append(loss.item())
        return math.fsum(losses) / len(losses)

    def micro_batch(self, reduces: bool) -> AbstractContextManager[None]:
        """Surrounds a backward, which is the last one of the step if it ``reduces``."""
        context: AbstractContextManager[None] = nullcontext() if reduces else self.optimizer.accumulate()
        return context

    def poison(self, last_rank: bool) -> None:
        """Puts a NaN into one element of a gradient that the last rank owns."""
        if last_rank:
            put_nan(self.inner.parameters())

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Returns the whole model in float32, by name; masters if there are any. Collective."""
        kept = [(name, self.optimizer.state.get(param, {}), param) for name, param in self.inner.named_parameters()]
        return {name: whole(state.get("master", param)).float().cpu().clone() for name, state, param in kept}

    @property
    def share(self) -> tuple[int, int]:
        """Returns which share of the global batch this rank trains on, and how many shares there are."""
        return world()

    def digests(self) -> dict[str, str]:
        digests: dict[str, str] = self.optimizer.state_digests() if self.ours else {}
        return digests

    def stats(self) -> dict[str, Any]:
        return self.optimizer.stats() if self.ours else {}

    def close(self) -> None:
        if self.ours:
            self.optimizer.close()


def put_nan(params: Iterable[Tensor]) -> None:
    """Into the first of their gradients that this rank has a part of."""
    for param in params:
        if param.grad is not None and local_of(param.grad).numel():
            local_of(param.grad).view(-1)[-1] = math.nan
            return


def whole(tensor: Any) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor.detach()
    return gathered


class Single(BaseEngine):
    """Trains in one process, also where that is a rank beside others."""

    replicated = "local"

    def make_optimizer(self, setup: Setup, speculation: str) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="superoffload: max_grad_norm")  # its norm is that of all
            return super().make_optimizer(setup, speculation)

    @property
    def share(self) -> tuple[int, int]:
        return 0, 1


def sharded(model: nn.Module, dtype: str, mesh: Any = None) -> nn.Module:
    """Applies fully_shard to every block of ``model``: parameters in ``dtype``, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


class Fsdp2(BaseEngine):
    """Trains under FSDP2 with superoffload.AdamW on bf16 parameters."""

    def wrap(self, model: Transformer) -> nn.Module:
        return sharded(model, self.setup.dtype)

    def micro_batch(self, reduces: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(reduces)
        return nullcontext()


class PlainFsdp2(Fsdp2):
    """Trains under FSDP2 with torch's own AdamW on fp32 parameters, cast to bf16 for compute, as is common on GPUs."""

    ours = False

    def build(self, setup: Setup) -> Any:
        return super().build(setup).float()

    def make_optimizer(self, setup: Setup, speculation: str) -> Any:
        return ClippingAdamW(self.inner.parameters(), setup)


class Ddp(BaseEngine):
    """Trains under DistributedDataParallel with our communication hook."""

    def wrap(self, model: Transformer) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, bucket_cap_mb=0.1)

    def micro_batch(self, reduces: bool) -> AbstractContextManager[None]:
        model = self.model
        return nullcontext() if reduces else model.no_sync()

    def poison(self, last_rank: bool) -> None:
        super().poison(True)  # all ranks have the same gradients, so one rank's NaN is on all


class ClippingAdamW(torch.optim.AdamW):
    """Adds clipping and skipping to torch's AdamW as its users do."""

    def __init__(self, params: Iterable[Tensor], setup: Setup) -> None:
        super().__init__(params, lr=setup.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
        self.max_grad_norm: float | None = setup.max_grad_norm
        self.grad_norm = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        self.grad_norm = float(whole(torch.nn.utils.clip_grad_norm_(params, limit)))
        if math.isfinite(self.grad_norm):
            super().step()


# Name -> class, or "module:class" of one that is loaded on demand.
ENGINES: dict[str, type[Any] | str] = {
    "single": Single,
    "fsdp2": Fsdp2,
    "ddp": Ddp,
    "tp": "tests.convergence.parallel:TensorParallel",
    "pp": "tests.convergence.pipeline_stages:PipelineStages",
    "ep": "tests.convergence.parallel:ExpertParallel",
    "deepspeed": "tests.convergence.zero:Zero3",
    "zero2": "tests.convergence.zero:Zero2",
    "titan": "tests.convergence.titan_trainer:Titan",
    "plain-fsdp2": PlainFsdp2,
    "plain-titan": "tests.convergence.titan_trainer:PlainTitan",
}
CHOICES = [name for name in ENGINES if not name.startswith("plain-")]  # the others are what these are compared with
# Name -> module, and how to install it.
_NEEDS = {
    "deepspeed": ("deepspeed", "pip install deepspeed==0.19.8"),
    "zero2": ("deepspeed", "pip install deepspeed==0.19.8"),
    "titan": ("torchtitan", "pip install --no-deps -r requirements/torchtitan.txt (docs/frameworks.md#torchtitan)"),
}
ON_DEMAND = ("fsdp2", "tp", "pp", "ep", "titan")  # also compared with delivery on demand


def setup_for(name: str, setup: Setup) -> Setup:
    """Returns ``setup`` with the experts that only the engine ``ep`` trains.

    In bf16 one rounding can send a token to another expert, and runs that add up in different orders part soon: nothing
    could be told from their distance. In fp32 with half of the learning rate they stay together for hundreds of steps.
    Gradients stay larger for longer, so twice the norm is clipped to.
    """
    if name != "ep":
        return setup
    return replace(setup, experts=EXPERTS, dtype="fp32", lr=setup.lr / 2, max_grad_norm=2 * setup.max_grad_norm)


def check_engine(name: str, count: int | None = None) -> None:
    """Raises ArgumentError if there is no such engine, or what it needs is not installed. With ``count`` also if it is
    not one to choose, or cannot train on so many ranks."""
    if name not in (ENGINES if count is None else CHOICES):
        raise ArgumentError(f"engine={name}: expected one of {', '.join(CHOICES)}")
    module, remedy = _NEEDS.get(name, ("torch", ""))
    if find_spec(module) is None:
        raise ArgumentError(f"engine={name}: {module} is not installed; {remedy}")
    if name == "single" and count not in (None, 1):
        others = ", ".join(other for other in CHOICES if other != "single")
        raise ArgumentError(f"engine=single with ranks={count}: one process is one rank; choose --engine {others}")
    check_pairs(name, count or PAIR)


def make_engine(name: str, setup: Setup, speculation: str) -> BaseEngine:
    check_engine(name)
    entry = ENGINES[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(import_module(module), attribute)
    engine: BaseEngine = entry(setup, speculation)
    return engine


def world() -> tuple[int, int]:
    """Returns this rank and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

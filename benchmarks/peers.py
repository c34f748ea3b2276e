"""Trains with other libraries' offloading optimizers and with ours on the CPU: time, a NaN, and a resumed run.

Every contestant gets the same given gradients, so that an iteration costs what its optimizer costs. Parameters are
bf16, and FSDP2's fp32. What needs a GPU's streams or pinned memory (torchao, Megatron) is stubbed: copies are
made in host memory, at once.
"""

from __future__ import annotations

import argparse
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.gpu_suite.contestants import be_a_rank, prepare_deepspeed
from benchmarks.timing import Contestant, Rounds, compared, timed
from superoffload import AdamW
from superoffload.integrations import megatron as adapter
from tests.support.hybrid_device import DeviceParameter, hybrid, megatron, without_streams

OURS = "ours, stepped after backward"
SKIPPED, SAME_BITS = "the step is skipped", "the same bits"
_NORM = 1.0  # of gradients that hardly ever clip
_THREADS = 2  # of every contestant
_STEPS = 3  # before a checkpoint and after it


def make_parser() -> argparse.ArgumentParser:
    parser = command.parser("peers", (__doc__ or "").split("\n")[0], plot=False)
    command.add_option(parser, "--count", type=int, default=48, help="parameters")
    command.add_option(parser, "--numel", type=int, default=1 << 20, help="elements of each")
    command.add_option(parser, "--seconds", type=float, default=100.0, help="of measuring")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    command.positive(args, "count", "numel", "seconds")
    count, numel, seconds = (4, 1 << 12, 0.1) if args.quick else (args.count, args.numel, args.seconds)
    torch.set_num_threads(_THREADS)
    programs = {name: make for name, (package, make) in PROGRAMS.items() if find_spec(package) is not None}
    print("".join(f"{name}: not installed\n" for name in PROGRAMS if name not in programs), end="")
    with without_streams(), pageable_memory():
        if find_spec("megatron") is not None:
            MegatronOurs.choose()
        checks = {name: {"nan": after_a_nan(make), "resume": resumed(make)} for name, make in programs.items()}
        with ExitStack() as stack:
            contestants = []
            for name, make in programs.items():
                program = make(Given(count, numel, on_device=make.on_device))
                stack.callback(program.close)
                contestants.append(Contestant(name, "", 0.0, timed(program.iterate), settles=True))
            rows = compared(contestants, Rounds(5, 200, seconds), OURS)
    print(f"{'optimizer':48} {'ns per parameter':>16} {'times as long':>13}  {'after a NaN':20} resumed")
    for row in rows:
        row |= {"count": count, "numel": numel, "threads": _THREADS, **checks[row["name"]]}
        nanoseconds = 1e9 * row["seconds_median"] / (count * numel)
        print(f"{row['name']:48} {nanoseconds:16.3f} {row['ratio']:13.2f}  {row['nan']:20} {row['resume']}")
    ours = [row for row in rows if row["name"].startswith("ours")]
    missed = [f"{row['name']}: {row['nan']}" for row in ours if row["nan"] != SKIPPED]
    missed += [f"{row['name']}: {row['resume']}" for row in ours if row["resume"] != SAME_BITS]
    return {"rows": rows, "missed": missed}


# ---- what is trained ------------------------------------------------------------------------------------------------


class _Given(torch.autograd.Function):
    """Has the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter, gradient: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.gradient = [gradient]  # no buffer: it is neither saved nor sharded

    def forward(self, factor: float | None) -> Tensor:
        gradient = self.gradient[0] if factor is None else self.gradient[0] * factor
        loss: Tensor = _Given.apply(self.weight, gradient.to(self.weight.dtype))
        return loss


class Given(nn.Module):
    """Some parameters of one size. ``seed``: of the weights; ``factor``: of the gradients of the next backward."""

    def __init__(self, count: int, numel: int, *, on_device: bool, seed: int = 0) -> None:
        super().__init__()
        of_weights, of_gradients = (torch.Generator().manual_seed(number) for number in (seed, 1))
        kind = DeviceParameter if on_device else nn.Parameter
        self.layers = nn.ModuleList(
            Layer(
                kind((0.02 * torch.randn(numel, generator=of_weights)).bfloat16()),
                1e-5 * torch.randn(numel, generator=of_gradients).bfloat16(),
            )
            for _ in range(count)
        )
        self.factor: float | None = None

    def forward(self) -> Tensor:
        return torch.stack([layer(self.factor) for layer in self.layers]).sum()


class Program(ABC):
    """Trains a model with an optimizer that steps the parameters themselves, or has masters of its own."""

    on_device = False  # whether parameters must say that they are

    def __init__(self, model: Any) -> None:
        self.model = model
        self.params: list[Any] = list(model.parameters())
        self.optimizer = self.make()

    @abstractmethod
    def make(self) -> Any:
        """Returns the optimizer."""

    def iterate(self, factor: float | None = None) -> None:
        self.model.factor = factor
        for param in self.params:
            param.grad = None
        self.model().backward()
        self.step()

    def step(self) -> None:
        self.optimizer.step()

    def save(self, folder: str) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def weights(self) -> list[Tensor]:
        return [getattr(param, "_local_tensor", param).detach().clone() for param in self.params]

    def close(self) -> None:
        """Lets go of the optimizer, and ends its threads."""
        del self.optimizer


class Torch(Program):
    """``torch.optim.AdamW(fused=True)`` over fp32 masters beside bf16 parameters; clips."""

    def make(self) -> Any:
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        return torch.optim.AdamW(self.masters, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.grad.float() if master.grad is None else master.grad.copy_(param.grad)
        nn.utils.clip_grad_norm_(self.masters, _NORM)
        self.optimizer.step()
        torch._foreach_copy_(self.params, list(self.masters))

    def save(self, folder: str) -> Any:
        return (*super().save(folder), copy.deepcopy(self.masters))

    @torch.no_grad()
    def load(self, saved: Any) -> None:
        super().load(saved)
        torch._foreach_copy_(list(self.masters), saved[2])


class Ours(Program):
    speculation = "never"

    def make(self) -> Any:
        return AdamW(self.params, speculation=self.speculation, max_grad_norm=_NORM, threads=_THREADS)

    def close(self) -> None:
        self.optimizer.close()


class OursSpeculating(Ours):
    speculation = "always"


class TorchAo(Program):
    """``CPUOffloadOptimizer``: bf16 moments, no masters, no clipping."""

    def make(self) -> Any:
        from torchao.optim import CPUOffloadOptimizer

        with mock.patch("torchao.optim.cpu_offload.get_available_devices", lambda: ["cuda"]):
            return CPUOffloadOptimizer(self.params, torch.optim.AdamW, fused=True, lr=1e-3)


class Megatron(Program):
    """``HybridDeviceOptimizer`` without Megatron's clipping, which runs on the GPU."""

    on_device = True
    overlap: bool = True
    cpu_class: Any = torch.optim.AdamW

    def make(self) -> Any:
        return hybrid(self.cpu_class, self.params, overlap_cpu_optimizer_d2h_h2d=self.overlap)


class MegatronAtOnce(Megatron):
    overlap = False


class MegatronOurs(Megatron):
    """Steps with our CPUAdamW."""

    @classmethod
    def choose(cls) -> None:
        """Takes the class that Megatron uses after ``enable()``; must come before any of its optimizers is made."""
        adapter.enable(threads=_THREADS)
        try:
            cls.cpu_class = megatron("megatron.core.optimizer").CPUAdam
        finally:
            adapter.disable()


class MegatronOursAtOnce(MegatronOurs):
    overlap = False


class Fsdp2(Program):
    """``CPUOffloadPolicy`` on one rank: fp32 parameters, gradients and moments in host memory; clips."""

    def __init__(self, model: Any) -> None:
        from torch import distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        be_a_rank()
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for layer in model.float().layers:
            fully_shard(layer, **options)
        super().__init__(fully_shard(model, **options))

    def make(self) -> Any:
        return torch.optim.AdamW(self.params, fused=True)

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.params, _NORM)
        self.optimizer.step()


class ZeroOffload(Program):
    """DeepSpeed's ZeRO stage 2 with its optimizer on the CPU, on one rank; clips."""

    def make(self) -> Any:
        prepare_deepspeed("cpu")
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": _NORM,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "steps_per_print": 10**9,
        }
        self.model, *_ = deepspeed.initialize(model=self.model, config=config)
        return self.model

    def iterate(self, factor: float | None = None) -> None:
        self.model.module.factor = factor
        self.model.backward(self.model())
        self.model.step()

    def save(self, folder: str) -> Any:
        self.model.save_checkpoint(folder)
        return folder

    def load(self, saved: Any) -> None:
        self.model.load_checkpoint(saved)

    def close(self) -> None:
        self.model.destroy()


PROGRAMS: dict[str, tuple[str, type[Program]]] = {
    OURS: ("torch", Ours),
    "ours, stepped during backward": ("torch", OursSpeculating),
    "torch.optim.AdamW(fused=True), fp32 masters": ("torch", Torch),
    "torchao CPUOffloadOptimizer, bf16 state": ("torchao", TorchAo),
    "FSDP2 CPUOffloadPolicy, fp32": ("torch", Fsdp2),
    "DeepSpeed ZeRO-Offload": ("deepspeed", ZeroOffload),
    "Megatron HybridDeviceOptimizer, overlap": ("megatron", Megatron),
    "Megatron HybridDeviceOptimizer": ("megatron", MegatronAtOnce),
    "Megatron, overlap, CPUAdamW": ("megatron", MegatronOurs),
    "Megatron, CPUAdamW": ("megatron", MegatronOursAtOnce),
}


# ---- what is checked ------------------------------------------------------------------------------------------------


def after_a_nan(make: type[Program]) -> str:
    """Returns what a step with a NaN in its gradients leaves behind."""
    with program_of(make) as program:
        program.iterate()
        before = program.weights()
        program.iterate(float("nan"))
        kept = all(map(torch.equal, before, program.weights()))
        program.iterate()
        finite = all(bool(weight.isfinite().all()) for weight in program.weights())
    return "NaN in the weights" if not finite else SKIPPED if kept else "weights have changed"


def resumed(make: type[Program]) -> str:
    """Returns whether a run that is saved and loaded into a new program has the bits of the run that goes on."""
    with TemporaryDirectory() as folder:
        with program_of(make) as program:
            iterate(program, 0)
            saved = program.save(folder)
            iterate(program, _STEPS)
            expected = program.weights()
        for weights, order in (None, ""), (saved, ", if made after the weights are loaded"):
            with program_of(make, seed=2, weights=weights) as program:
                program.load(copy.deepcopy(saved))  # torch takes tensors of state as they are
                iterate(program, _STEPS)
                if all(map(torch.equal, expected, program.weights())):
                    return SAME_BITS + order
            if saved == folder:
                break  # it holds weights and state
    return "other bits"


def iterate(program: Program, first: int) -> None:
    """Takes steps, each with gradients of its own."""
    for step in range(first, first + _STEPS):
        program.iterate(1.0 + step / 4)


@contextmanager
def program_of(make: type[Program], seed: int = 0, weights: Any = None) -> Iterator[Program]:
    """Makes a small program; ``weights``: what another saved, whose weights are loaded first."""
    model = Given(4, 1 << 13, on_device=make.on_device, seed=seed)
    if weights is not None:
        model.load_state_dict(weights[0])
    program = make(model)
    try:
        yield program
    finally:
        program.close()


@contextmanager
def pageable_memory() -> Iterator[None]:
    """Lets torchao allocate plain memory instead of pinned memory, which needs a GPU."""
    empty_like = torch.empty_like

    def pageable(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty_like(*args, **options)

    with mock.patch("torch.empty_like", pageable):
        yield


if __name__ == "__main__":
    raise SystemExit(command.start(make_parser(), run))

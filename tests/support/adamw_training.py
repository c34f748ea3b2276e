"""The same user code run by superoffload.AdamW in every mode and by torch.optim.AdamW, and what they must agree on."""

from __future__ import annotations

import copy
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from superoffload import AdamW
from superoffload.engine.schedule import MODES
from tests.support.quick_python import QuickPython

torch.set_num_threads(1)  # of torch's own: these models are too small for more, and idle ones would spin

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTERS = ("buckets_committed", "buckets_replayed", "buckets_undone", "buckets_skipped", "buckets_abandoned")


class TorchAdamW(torch.optim.AdamW):
    """torch's, with clipping and skipping done as its users do, and our extra methods as what they mean for it."""

    def __init__(self, params: Any, *args: Any, max_grad_norm: float | None = None, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        self.max_grad_norm = max_grad_norm

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(torch.isfinite(p.grad).all()) for p in params if p.grad is not None):
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
            step: Any = torch.optim.AdamW.step
            if getattr(step, "hooked", False):  # by another instance; step hooks are called around this method already
                step = step.__wrapped__
            step(self)
        return loss

    def accumulate(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refresh_masters(self) -> None: ...

    def close(self) -> None: ...


Optimizer = AdamW | TorchAdamW
Scenario = Callable[[nn.Module, Optimizer], None]


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Small, with weights, biases, a norm, and a parameter that a forward may leave without gradient."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.LayerNorm(48), nn.Linear(48, 4)).to(dtype)


class Reordered(nn.Module):
    """A convolution in channels_last, and a transposed weight."""

    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(4, channels, 2, bias=False).bfloat16()
        weight: Any = self.conv.weight
        weight.data = weight.detach().contiguous(memory_format=torch.channels_last)
        self.last = nn.ParameterList([nn.Parameter(torch.randn(4, channels).bfloat16().t())])

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.conv(x.view(-1, 4, 2, 2)).flatten(1)) @ self.last[0]
        return found


def batch(model: nn.Module, seed: int, scale: float = 1.0, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The loss of a random batch; the same for the same weights and seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = (scale * torch.randn(8, 16, generator=generator)).to(dtype)
    y = torch.randn(8, 4, generator=generator).to(dtype)
    loss: Tensor = ((call or model)(x) - y).square().mean()
    return loss


def train(model: nn.Module, optimizer: Optimizer, seeds: Sequence[int] = range(6), scale: float = 1.0) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        batch(model, seed, scale).backward()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def run_ours(
    scenario: Scenario, mode: str, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, AdamW]:
    model = model_of(dtype)
    optimizer = AdamW(model.parameters(), speculation=mode, threads=2, **options)
    try:
        scenario(model, optimizer)
    finally:
        optimizer.close()  # takes back what a scenario leaves unfinished
    check_counters(optimizer)
    return model, optimizer


def check_counters(optimizer: AdamW) -> None:
    """Once a step has ended."""
    stats = optimizer.stats()
    assert stats["buckets_speculated"] == sum(stats[name] for name in COUNTERS)


def check_scenario(scenario: Scenario, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, float | int]:
    """All modes agree bit for bit; with fp32 also with torch. Returns the counters of the mode "always"."""
    runs = {mode: run_ours(scenario, mode, dtype, **options) for mode in MODES}
    digests = {mode: optimizer.state_digests() for mode, (_, optimizer) in runs.items()}
    assert digests["always"] == digests["never"] == digests["adaptive"]
    assert runs["never"][1].stats()["buckets_speculated"] == 0
    if dtype is torch.float32:
        theirs = model_of()
        optimizer = TorchAdamW(theirs.parameters(), **torch_options(options))
        scenario(theirs, optimizer)
        ours = runs["never"][0]
        assert_trained_alike(ours, theirs)
    return runs["always"][1].stats()


def torch_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in options.items() if name != "bucket_numel"}


def assert_close_to_torch(ours: Tensor, theirs: Tensor, accumulated_lr: float) -> None:
    """The promised tolerance: 1e-6 of the larger of the weight and the learning rates of all steps."""
    allowed = 1e-6 * theirs.abs().clamp(min=accumulated_lr)
    excess = ((ours - theirs).abs() / allowed).max().item()
    assert excess <= 1.0, f"{excess} times the tolerance"


def assert_trained_alike(ours: nn.Module, theirs: nn.Module) -> None:
    """A wrong step is off by about a learning rate, 1e-3; rounding, fed back through the gradients, by under 1e-6."""
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


def worker_threads() -> set[int]:
    """Task ids of the worker threads of this process, by their names; none where there is no /proc."""
    found = set()
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # ended meanwhile
            if (task / "comm").read_text().startswith("superoffload-"):
                found.add(int(task.name))
    return found


def _worker_threads_once(hold: Callable[[set[int]], bool]) -> set[int]:
    """Soon: a thread names itself after it has begun, and is in the kernel's list for a while after join()."""
    until = time.monotonic() + 60
    while not hold(found := worker_threads()):
        assert time.monotonic() < until, found
        time.sleep(0.001)
    return found


def assert_worker_threads(expected: set[int]) -> None:
    """These worker threads and no others."""
    _worker_threads_once(lambda found: found == expected)


def worker_threads_when(count: int) -> set[int]:
    """The worker threads once there are so many."""
    return _worker_threads_once(lambda found: len(found) == count)


@contextmanager
def pair(**options: Any) -> Iterator[tuple[nn.Module, AdamW, nn.Module, AdamW]]:
    """A speculating optimizer and one that waits, on equal models."""
    model, twin = model_of(), model_of()
    with (
        AdamW(model.parameters(), speculation="always", **options) as optimizer,
        AdamW(twin.parameters(), speculation="never", **options) as plain,
    ):
        yield model, optimizer, twin, plain


def run_python(script: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which must say nothing to standard error."""
    done = python().run(["-c", script], timeout=timeout)
    assert not done.stderr, done.stderr
    return done


@cache
def python() -> QuickPython:
    """An optimizer loads torch._dynamo, which takes longer than most scripts. Ours is not loaded before a script asks
    for it, since some look at what ends first."""
    quiet = "ignore:This process:DeprecationWarning"  # is multi-threaded and forks: Python 3.12 and newer say it
    return QuickPython(["torch", "torch._dynamo"], {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": quiet})


def grads_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@contextmanager
def nothing_shows(model: nn.Module) -> Any:
    """No parameter changes its bits or its version inside."""
    before = [(p.detach().clone(), p._version, p.data_ptr()) for p in model.parameters()]
    yield
    for param, (value, version, address) in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.detach(), value)
        assert param._version == version
        assert param.data_ptr() == address

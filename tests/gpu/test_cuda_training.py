"""How users train: with state on the device, checkpointed activations, micro-batches, a compiled model, no NVRTC; and
what they run first, `superoffload verify` and the demo.

Without a GPU over the stand-in for the driver. A GPU shows the rest: its allocator, its streams, its kernels. Bits are
compared with ``speculation="never"`` on the same device, or with the host's where gradients are given.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.given_gradients import Run, train
from benchmarks.gpu_suite.races import deterministic
from superoffload import AdamW
from superoffload.errors import KernelsUnavailable
from superoffload.tools.cli import main
from tests.support.checkout import ROOT

devices = pytest.mark.parametrize("device", ["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])


@cache
def on_host(dtype: torch.dtype) -> Run:
    return train("cpu", dtype, speculation="never")


# ---- state on the device --------------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("speculation", ["always", "never"])
@pytest.mark.parametrize("placement", [{"gpu_fraction": 0.25}, {"gpu_fraction": 1.0}, "auto"], ids=str)
def test_state_on_the_device_has_the_hosts_bits(device: str, placement: Any, speculation: str) -> None:
    run = train(device, torch.bfloat16, speculation=speculation, placement=placement)
    expected = on_host(torch.bfloat16)
    assert run.norms == expected.norms and run.digests == expected.digests
    assert all(torch.equal(one, other) for one, other in zip(run.parameters, expected.parameters, strict=True))
    if placement != "auto":  # which decides by measured times
        numel = sum(param.numel() for param in run.parameters)
        at_most = placement["gpu_fraction"] * numel
        assert 0 < run.stats["params_on_device"] <= at_most
        assert (run.stats["params_on_device"] == numel) == (at_most == numel)


@devices
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float16, {}), (torch.bfloat16, {"state_dtype": "bf16", "seed": 3})],
    ids=["fp32", "fp16", "bf16 moments"],
)
def test_state_on_the_device_in_other_formats(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    run = train(device, dtype, speculation="always", placement={"gpu_fraction": 0.5}, **options)
    assert run.bits() == train("cpu", dtype, speculation="never", **options).bits()
    assert run.stats["params_on_device"] > 0


# ---- gradients that the device computes, deterministically ----------------------------------------------------------

NEVER, ALWAYS, ADAPTIVE = ({"speculation": mode} for mode in ("never", "always", "adaptive"))
ON_DEMAND = {**ALWAYS, "delivery": "on_demand"}
STEPS, WIDTH = 5, 64
has_compiler = shutil.which("g++") is not None or shutil.which("c++") is not None
needs_compiler = pytest.mark.skipif(
    not has_compiler, reason="needs a C++ compiler (apt-get install g++): torch.compile builds with it"
)


class Way(NamedTuple):
    reentrant: bool | None = None  # activations are computed again in backward, by torch's older or newer way; or not
    compiled: bool = False
    micro_batches: int = 1
    blocks: int = 4


class Small(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 8)
        parts = (nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, parts)) for _ in range(way.blocks))
        self._reentrant = way.reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            again: Any = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
            x = x + again
        found: Tensor = self.last(x)
        return found


Outcome = tuple[list[float], list[float], list[dict[str, str]]]  # losses, norms, digests: compared to the bit


def runs(device_name: str, way: Way, options: Sequence[Mapping[str, Any]]) -> list[tuple[Outcome, dict[str, Any]]]:
    """One model, and one run with its statistics from its first parameters for every optimizer with these options. One,
    because what is compiled twice may not be compiled alike."""
    device = open_device(device_name)
    with deterministic(), device.links():
        torch.manual_seed(0)
        model = Small(way).to(device=device.torch, dtype=torch.bfloat16)
        first = {name: value.clone() for name, value in model.state_dict().items()}
        forward: Any = torch.compile(model) if way.compiled else model
        found = []
        for one in options:
            model.load_state_dict(first)
            found.append(run(device, model, forward, way, one))
            device.synchronize()
        return found


def run(
    device: Device, model: nn.Module, forward: Any, way: Way, options: Mapping[str, Any]
) -> tuple[Outcome, dict[str, Any]]:
    losses, norms, digests = [], [], []
    on_demand = options.get("delivery") == "on_demand"
    given: dict[str, Any] = {"lr": 3e-3, "threads": 2, "bucket_numel": 4096, **options}
    with AdamW(model.parameters(), module=model if on_demand else None, **given) as optimizer:
        if not way.compiled:  # what the compiler traces waits for nothing
            device.prepare(model)
        for step in range(STEPS):
            optimizer.max_grad_norm = 1e-2 if step % 2 else 1e6
            if way.compiled:
                device.catch_up()
            for part in range(way.micro_batches - 1):
                with optimizer.accumulate():
                    backward(device, forward, 100 * step + part)
            losses.append(backward(device, forward, 100 * step + 99))
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
            if not on_demand or step == STEPS - 1:  # a digest waits for all deliveries
                optimizer.synchronize()
                device.catch_up()
                digests.append(optimizer.state_digests())
        return (losses, norms, digests), optimizer.stats()


def backward(device: Device, forward: Any, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(32, size, generator=generator).to(device.torch) for size in (16, 8))
    loss = (forward(inputs.bfloat16()).float() - targets).square().mean()
    loss.backward()
    return float(loss.detach())


WAYS = {
    "plain": Way(),
    "not reentrant": Way(reentrant=False),
    "reentrant": Way(reentrant=True),
    "micro-batches": Way(micro_batches=3),
    "compiled": Way(compiled=True, blocks=1),
}


@devices
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_compiler if name == "compiled" else ()) for name in WAYS]
)
def test_speculation_and_delivery_change_no_bit(device: str, name: str) -> None:
    way, on_stand_in = WAYS[name], device == "stand-in"
    if way.compiled and on_stand_in:
        way = way._replace(blocks=0)  # the compiler for CPUs takes half a minute for a block
    options = [NEVER, ALWAYS, ADAPTIVE, *(() if way.compiled else (ON_DEMAND,))]
    ((losses, norms, digests), _), *others = runs(device, way, options)
    for outcome, _ in others:
        assert outcome[:2] == (losses, norms), "every forward has read the new parameters"
        assert outcome[2] in (digests, digests[-1:])
    stats = others[0][1]
    assert stats["buckets_speculated"] > 0 and stats["clipped_steps"] == 2
    if way.reentrant is not None:
        assert runs(device, Way(), [NEVER])[0][0] == (losses, norms, digests), "as without checkpoints"
    ((on_cpu, _),) = runs("cpu", way._replace(compiled=False), [NEVER])
    if on_stand_in and not way.compiled:
        assert on_cpu == (losses, norms, digests)
    # Other kernels compute the gradients of a GPU, and those of a compiled model.
    assert losses == pytest.approx(on_cpu[0], rel=0.1) and norms == pytest.approx(on_cpu[1], rel=0.2)


# ---- without NVRTC ---------------------------------------------------------------------------------------------------


@devices
def test_without_kernels_it_works_or_says_what_to_install(device: str) -> None:
    try:
        run = train(device, torch.bfloat16, speculation="always", link={"image": b""})
    except KernelsUnavailable as error:
        assert "install" in str(error)
        return
    assert run.bits() == on_host(torch.bfloat16).bits()
    assert run.link["residency"] is None, "there were none"


# ---- what users run first -------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("delivery", ["eager", "on_demand"])
def test_verify(delivery: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quiet", "--device", "cuda", "--delivery", delivery]) == 0, capsys.readouterr().out


@pytest.mark.gpu
def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo.py", "--device", "cuda", "--first-steps", "40", "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr

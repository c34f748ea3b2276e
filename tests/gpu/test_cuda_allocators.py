"""torch's other allocators: memory that grows in place, and CUDA's own pools. Each in a process of its own, which runs
this file: torch chooses the allocator once, when it starts on the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu_suite.devices import open_device
from benchmarks.gpu_suite.given_gradients import train
from benchmarks.gpu_suite.races import deterministic, run_races
from superoffload import AdamW
from tests.support.checkout import ROOT

SETTINGS = {"expandable segments": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}
# Without a GPU the program is tried once, without the allocator.
TRIED = (("stand-in", "expandable segments"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in SETTINGS))
# The first is the name since torch 2.9.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LAYERS, WIDTH, STEPS = 12, 256, 6


@pytest.mark.parametrize(("device", "name"), TRIED)
def test_bits_with_another_allocator(device: str, name: str) -> None:
    settings = dict.fromkeys(VARIABLES, SETTINGS[name])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **settings}
    command = [sys.executable, "-m", __name__, device, name]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=45)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == {"wrong": [], "in_use": None if device == "stand-in" else True}, ended.stderr


# ---- in the process -------------------------------------------------------------------------------------------------


def what_is_wrong(device_name: str) -> list[str]:
    expected, wrong = train("cpu", torch.bfloat16, speculation="never"), []
    for options in ({}, {"placement": {"gpu_fraction": 0.5}}, {"delivery": "on_demand", "waits": False}):
        run = train(device_name, torch.bfloat16, speculation="always", **options)
        last = (run.digests[-1], run.norms) == (expected.digests[-1], expected.norms)
        if not last or ("waits" not in options and run.digests != expected.digests):
            wrong.append(str(options))
    for delivery in ("eager", "on_demand"):
        seeds = run_races(device_name, "always", delivery, seeds=[1, 2], steps=6)["different_seeds"]
        wrong += [f"delays, {delivery}: seed {seed}" for seed in seeds]
    if freed_and_used_again(device_name, "never") != freed_and_used_again(device_name, "always"):
        wrong.append("gradients whose memory is used again")
    return wrong


def freed_and_used_again(device_name: str, speculation: str) -> list[dict[str, str]]:
    """Every gradient is as large as the activations and gradients beside it, so that its memory goes on at once."""
    device, digests = open_device(device_name), []
    with deterministic(), device.links():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
        model = nn.Sequential(*layers).to(device=device.torch, dtype=torch.bfloat16)
        with AdamW(model.parameters(), bucket_numel=WIDTH * WIDTH, threads=2, speculation=speculation) as optimizer:
            device.prepare(model)
            for step in range(STEPS):
                inputs = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(step))
                model(inputs.to(device=device.torch, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.synchronize()
                device.catch_up()
                digests.append(optimizer.state_digests())
    return digests


def is_in_use(device_name: str, name: str) -> bool | None:
    """Whether torch took the allocator; None where it has no device."""
    if not device_name.startswith("cuda"):
        return None
    if name == "cudaMallocAsync":
        return bool(torch.cuda.get_allocator_backend() == name)
    segments: Any = torch.cuda.memory_snapshot()
    return any(segment["is_expandable"] for segment in segments)


if __name__ == "__main__":
    wrong = what_is_wrong(sys.argv[1])
    print(json.dumps({"wrong": wrong, "in_use": is_in_use(*sys.argv[1:])}))

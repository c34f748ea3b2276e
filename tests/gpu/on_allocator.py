"""One process that trains with the allocator that its environment names: python -m tests.gpu.on_allocator DEVICE NAME.

Prints what it found as JSON. torch chooses the allocator once, when it starts on the device.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_suite.devices import Device, open_device
from benchmarks.gpu_suite.given_gradients import train
from benchmarks.gpu_suite.races import deterministic, run_races
from superoffload import AdamW

SETTINGS = {"expandable segments": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}
_LAYERS, _WIDTH, _STEPS = 12, 256, 6


def found(device_name: str, name: str) -> dict[str, Any]:
    expected = train("cpu", torch.bfloat16, speculation="never")
    wrong = []
    for options in ({}, {"placement": {"gpu_fraction": 0.5}}, {"delivery": "on_demand", "waits": False}):
        run = train(device_name, torch.bfloat16, speculation="always", **options)
        last = (run.digests[-1], run.norms) == (expected.digests[-1], expected.norms)
        if not last or ("waits" not in options and run.digests != expected.digests):
            wrong.append(str(options))
    for delivery in ("eager", "on_demand"):
        wrong += [f"delays, {delivery}: seed {seed}" for seed in _different(device_name, delivery)]
    never, always = (_freed_and_used_again(device_name, speculation) for speculation in ("never", "always"))
    if never != always:
        wrong.append("gradients whose memory is used again")
    return {"wrong": wrong, "in_use": _in_use(device_name, name)}


def _different(device_name: str, delivery: str) -> list[int]:
    seeds: list[int] = run_races(device_name, "always", delivery, seeds=[1, 2], steps=6)["different_seeds"]
    return seeds


def _freed_and_used_again(device_name: str, speculation: str) -> list[dict[str, str]]:
    """Every gradient is as large as the activations and gradients beside it, so that its memory goes on at once."""
    device = open_device(device_name)
    with deterministic(), device.links():
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False), nn.Tanh()) for _ in range(_LAYERS)]
        model = nn.Sequential(*layers).to(device=device.torch, dtype=torch.bfloat16)
        with AdamW(model.parameters(), bucket_numel=_WIDTH * _WIDTH, threads=2, speculation=speculation) as optimizer:
            device.prepare(model)
            return [_step(device, model, optimizer, step) for step in range(_STEPS)]


def _step(device: Device, model: nn.Module, optimizer: AdamW, step: int) -> dict[str, str]:
    inputs = torch.randn(_WIDTH, _WIDTH, generator=torch.Generator().manual_seed(step))
    model(inputs.to(device=device.torch, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    device.catch_up()
    return optimizer.state_digests()


def _in_use(device_name: str, name: str) -> bool | None:
    """Whether torch took the allocator; None where it has no device."""
    if not device_name.startswith("cuda"):
        return None
    if name == "cudaMallocAsync":
        return bool(torch.cuda.get_allocator_backend() == name)
    segments: Any = torch.cuda.memory_snapshot()
    return any(segment["is_expandable"] for segment in segments)


if __name__ == "__main__":
    print(json.dumps(found(*sys.argv[1:])))

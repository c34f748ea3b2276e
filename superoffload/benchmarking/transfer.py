"""Transfer policies side by side: `superoffload bench transfer`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from superoffload.cpus import worker_cpus
from superoffload.cuda.device import Device, TorchDevice
from superoffload.cuda.link import CudaLink, CudaOptions
from superoffload.cuda.measure import choose, measure_policies, worth_measuring
from superoffload.cuda.start import options_for
from superoffload.cuda.transfer import NARROW
from superoffload.errors import SuperOffloadError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Place:
    """A device, how to open links to it, and where torch puts tensors for it."""

    device: Device
    options: CudaOptions
    torch_device: torch.device


def on_this_gpu() -> Place:
    """The current CUDA device."""
    if not torch.cuda.is_available():
        raise SuperOffloadError(
            "bench transfer: there is no CUDA device here (torch.cuda.is_available() is False); nothing was measured. "
            "Run it on the machine with the GPU"
        )
    device = TorchDevice(torch.device("cuda"))
    return Place(device, options_for(device, keep_grads=None), device.torch_device)


def run_transfer(place: Place, dtype_name: str, numel: int, rounds: int) -> tuple[list[dict[str, Any]], str]:
    """A row per policy, and the name of the one that would be chosen."""
    dtype = _DTYPES[dtype_name]
    rates = measure_policies(
        lambda policy: CudaLink(place.device, replace(place.options, policy=policy)),
        worth_measuring([dtype], kernels=bool(place.options.image), pinned=True),
        dtype=dtype,
        numel=numel,
        cpus=worker_cpus(None, beside_device=True),
        rounds=rounds,
        device=place.torch_device,
    )
    plain = rates[NARROW.name].slowest
    rows = [
        {
            "name": name,
            "dtype": dtype_name,
            "numel": numel,
            "bytes_per_param": rate.bytes,
            "down_gb_per_s": rate.bytes / rate.down / 1e9,
            "up_gb_per_s": rate.bytes / rate.up / 1e9,
            "down_seconds_per_param": rate.down,
            "step_seconds_per_param": rate.step,
            "up_seconds_per_param": rate.up,
            "ratio_to": NARROW.name,
            "ratio": rate.slowest / plain,
        }
        for name, rate in rates.items()
    ]
    return rows, choose(rates).name

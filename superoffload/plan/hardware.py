"""Machines as the planner sees them: sizes and bandwidths per GPU, each with where the number comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError

GB, GIB = 10**9, 1 << 30

_KTH = "measured: Schieffer et al., KTH, 'Harnessing integrated CPU-GPU system memory', 2024"
_GRACE_SHARE = "486 GB/s STREAM measured (KTH, 2024); 420 while transfers run is this project's planning figure"
_PCIE = "x16 nominal per direction, times 0.85 for packet overhead (assumption; doctor measures it)"


@dataclass(frozen=True)
class Hardware:
    """Everything per GPU; bytes, bytes per second and bf16 operations per second.

    `link_down` is GPU to host. `collectives` is what one GPU sends and receives at once within a node, in use.
    """

    name: str
    gpu_memory: float
    flops: float
    gpu_bandwidth: float
    host_memory: float
    host_bandwidth: float
    link_down: float
    link_up: float
    collectives: float
    gpus_per_node: int
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if not getattr(self, name) > 0:
                raise ArgumentError(f"hardware {self.name}: {name}={getattr(self, name)}: expected a positive number")


_NUMBERS = (
    "gpu_memory", "flops", "gpu_bandwidth", "host_memory", "host_bandwidth", "link_down", "link_up", "collectives",
)  # fmt: skip

GH200_96 = Hardware(
    name="gh200-96",
    gpu_memory=96 * GIB,
    flops=989e12,
    gpu_bandwidth=3.4e12,
    host_memory=480 * GB,
    host_bandwidth=420e9,
    link_down=297e9,
    link_up=375e9,
    collectives=150e9,
    gpus_per_node=4,
    sources={
        "gpu_memory": "NVIDIA GH200 data sheet, 96 GB HBM3",
        "flops": "NVIDIA GH200 data sheet, bf16 without sparsity",
        "gpu_bandwidth": _KTH + " (4.0 TB/s nominal)",
        "host_memory": "NVIDIA GH200 data sheet, up to 480 GB LPDDR5X",
        "host_bandwidth": _GRACE_SHARE,
        "link_down": _KTH + " (450 GB/s nominal each way)",
        "link_up": _KTH + " (450 GB/s nominal each way)",
        "collectives": "450 GB/s each way nominal; a third of it fits the published stage 1 row (docs/plan.md)",
    },
)
GH200_144 = replace(
    GH200_96,
    name="gh200-144",
    gpu_memory=144 * GB,
    gpu_bandwidth=4.2e12,
    sources={
        **GH200_96.sources,
        "gpu_memory": "NVIDIA GH200 data sheet, 144 GB HBM3e",
        "gpu_bandwidth": "NVIDIA data sheet, 4.9 TB/s nominal, times the 0.85 measured on the 96 GB part",
    },
)
GB200 = Hardware(
    name="gb200",
    gpu_memory=186 * GB,
    flops=2500e12,
    gpu_bandwidth=6.8e12,
    host_memory=240 * GB,
    host_bandwidth=210e9,
    link_down=148e9,
    link_up=187e9,
    collectives=300e9,
    gpus_per_node=4,
    sources={
        "gpu_memory": "NVIDIA GB200 data sheet, 372 GB per Superchip of two GPUs",
        "flops": "NVIDIA GB200 data sheet, bf16 without sparsity, half of a Superchip",
        "gpu_bandwidth": "NVIDIA data sheet, 8 TB/s nominal, times the 0.85 measured on GH200",
        "host_memory": "NVIDIA GB200 data sheet, 480 GB per Grace, which two GPUs share",
        "host_bandwidth": "half of Grace's; " + _GRACE_SHARE,
        "link_down": "half of the GH200's measured NVLink-C2C, since two GPUs share it (not measured)",
        "link_up": "half of the GH200's measured NVLink-C2C, since two GPUs share it (not measured)",
        "collectives": "900 GB/s each way nominal, times GH200's share in use (not measured)",
    },
)
_X86_DDR5 = "two sockets with 8 channels of DDR5-4800, 614 GB/s nominal, for 8 GPUs, times 0.85 (assumption)"
H100 = Hardware(
    name="h100-pcie5",
    gpu_memory=80 * GIB,
    flops=989e12,
    gpu_bandwidth=2.85e12,
    host_memory=256 * GB,
    host_bandwidth=65e9,
    link_down=54e9,
    link_up=54e9,
    collectives=150e9,
    gpus_per_node=8,
    sources={
        "gpu_memory": "NVIDIA H100 SXM data sheet, 80 GB",
        "flops": "NVIDIA H100 SXM data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA data sheet, 3.35 TB/s nominal, times 0.85",
        "host_memory": "2 TB in a server of 8 GPUs (assumption)",
        "host_bandwidth": _X86_DDR5,
        "link_down": "PCIe 5 " + _PCIE,
        "link_up": "PCIe 5 " + _PCIE,
        "collectives": "NVLink 450 GB/s each way nominal, times GH200's share in use (not measured)",
    },
)
H200 = replace(
    H100,
    name="h200-pcie5",
    gpu_memory=141 * GB,
    gpu_bandwidth=4.1e12,
    sources={
        **H100.sources,
        "gpu_memory": "NVIDIA H200 data sheet, 141 GB",
        "flops": "NVIDIA H200 data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA data sheet, 4.8 TB/s nominal, times 0.85",
    },
)
A100 = Hardware(
    name="a100-pcie4",
    gpu_memory=80 * GIB,
    flops=312e12,
    gpu_bandwidth=1.73e12,
    host_memory=128 * GB,
    host_bandwidth=43e9,
    link_down=27e9,
    link_up=27e9,
    collectives=100e9,
    gpus_per_node=8,
    sources={
        "gpu_memory": "NVIDIA A100 SXM data sheet, 80 GB",
        "flops": "NVIDIA A100 data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA data sheet, 2.04 TB/s nominal, times 0.85",
        "host_memory": "1 TB in a server of 8 GPUs (assumption)",
        "host_bandwidth": "two sockets of DDR4-3200, 410 GB/s nominal, for 8 GPUs, times 0.85 (assumption)",
        "link_down": "PCIe 4 " + _PCIE,
        "link_up": "PCIe 4 " + _PCIE,
        "collectives": "NVLink 300 GB/s each way nominal, times GH200's share in use (not measured)",
    },
)
_PCIE4 = {"link_down": "PCIe 4 " + _PCIE, "link_up": "PCIe 4 " + _PCIE}
PROFILES = {
    profile.name: profile
    for profile in (
        GH200_96,
        GH200_144,
        GB200,
        H100,
        replace(H100, name="h100-pcie4", link_down=27e9, link_up=27e9, sources={**H100.sources, **_PCIE4}),
        H200,
        replace(H200, name="h200-pcie4", link_down=27e9, link_up=27e9, sources={**H200.sources, **_PCIE4}),
        A100,
    )
}


def find_hardware(name: str, gpu: str | None = None, host_bandwidth: float | None = None) -> Hardware:
    """A built-in profile, or the machine in a file of `superoffload doctor --json` with the GPU of profile `gpu`.

    `host_bandwidth`: bytes per second and GPU, in the place of the one that is known.
    """
    if host_bandwidth is not None and not 0 < host_bandwidth < math.inf:
        raise ArgumentError(f"host_bandwidth={host_bandwidth / GB:g}: expected GB/s, a number above 0")
    if name in PROFILES:
        return _given(PROFILES[name], host_bandwidth)
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        raise ArgumentError(
            f"hardware={name}: expected one of {', '.join(PROFILES)}, or a file written by superoffload doctor --json"
        )
    try:
        machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
        return from_doctor(machine, gpu, name, host_bandwidth)
    except OSError as error:
        raise ArgumentError(f"hardware={name}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"hardware={name}: not a file written by superoffload doctor --json") from error


def _given(hardware: Hardware, host_bandwidth: float | None) -> Hardware:
    if host_bandwidth is None:
        return hardware
    sources = {**hardware.sources, "host_bandwidth": "given (--host-bandwidth)"}
    return replace(hardware, host_bandwidth=host_bandwidth, sources=sources)


def from_doctor(
    machine: Mapping[str, Any], gpu: str | None, source: str, host_bandwidth: float | None = None
) -> Hardware:
    """Host side as measured; of the GPU, what doctor cannot know (arithmetic) from the profile it resembles."""
    devices = machine["GPU"]["devices"]
    base = PROFILES.get(gpu) if gpu else _resembling(devices)
    if base is None:
        raise ArgumentError(
            f"hardware={source}: {'gpu=' + gpu if gpu else 'doctor saw no GPU that is known here'}; pass --gpu with "
            f"one of {', '.join(PROFILES)} for the GPU, and this file stays the host"
        )
    sharing = max(1, len(devices))
    measured = f"measured by doctor ({source})"
    if machine["memory"]["usable_bytes"] is None:
        raise ArgumentError(
            f"hardware={source}: doctor could not tell how much memory there is; mount /proc there and run it again"
        )
    values: dict[str, Any] = {"host_memory": machine["memory"]["usable_bytes"] / sharing}
    if "memory bandwidth" in machine:
        values["host_bandwidth"] = machine["memory bandwidth"]["bytes_per_second"] / sharing
    elif host_bandwidth is None:
        raise ArgumentError(
            f"hardware={source}: written with --no-bandwidth, so the memory bandwidth is missing; run superoffload "
            f"doctor --json {source} there without --no-bandwidth, or give it: --host-bandwidth GB_PER_SECOND (per GPU)"
        )
    if devices and not gpu:
        device = devices[0]
        values["gpu_memory"] = device["memory_bytes"]
        if device["host_to_device"]:
            values.update(link_up=device["host_to_device"], link_down=device["device_to_host"])
        values["gpus_per_node"] = len(devices)
    sources = {**base.sources, **{key: measured for key in values if key in _NUMBERS}}
    found = replace(base, name=f"{Path(source).stem} + {base.name}", sources=sources, **values)
    return _given(found, host_bandwidth)


def _resembling(devices: list[Mapping[str, Any]]) -> Hardware | None:
    words = devices[0]["name"].lower() if devices else ""
    names = (("gb200", GB200), ("gh200", GH200_96), ("h200", H200), ("h100", H100), ("a100", A100))
    return next((profile for word, profile in names if word in words), None)

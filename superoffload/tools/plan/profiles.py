"""Lists built-in machines by vendors' data sheets and others' publications; this project measured none of them."""

from __future__ import annotations

import re
from dataclasses import replace

from superoffload.tools.plan.cards import CARDS, DDR4_SERVER, DDR5_SERVER, LINK
from superoffload.tools.plan.machines import GB, GIB, Hardware

_KTH = "measured: Schieffer et al., KTH, 'Harnessing integrated CPU-GPU system memory', 2024"
_GRACE_SHARE = "486 GB/s STREAM measured (KTH, 2024); 420 while transfers run is this project's planning figure"


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
H100 = Hardware(
    name="h100-pcie5",
    gpu_memory=80 * GIB,
    flops=989e12,
    gpu_bandwidth=2.85e12,
    host_memory=DDR5_SERVER.memory,
    host_bandwidth=DDR5_SERVER.bandwidth,
    link_down=54e9,
    link_up=54e9,
    collectives=150e9,
    gpus_per_node=8,
    sources={
        "gpu_memory": "NVIDIA H100 SXM data sheet, 80 GB",
        "flops": "NVIDIA H100 SXM data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA data sheet, 3.35 TB/s nominal, times 0.85",
        "host_memory": DDR5_SERVER.memory_source,
        "host_bandwidth": DDR5_SERVER.bandwidth_source,
        "link_down": LINK.format(5),
        "link_up": LINK.format(5),
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
    host_memory=DDR4_SERVER.memory,
    host_bandwidth=DDR4_SERVER.bandwidth,
    link_down=27e9,
    link_up=27e9,
    collectives=100e9,
    gpus_per_node=8,
    sources={
        "gpu_memory": "NVIDIA A100 SXM data sheet, 80 GB",
        "flops": "NVIDIA A100 data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA data sheet, 2.04 TB/s nominal, times 0.85",
        "host_memory": DDR4_SERVER.memory_source,
        "host_bandwidth": DDR4_SERVER.bandwidth_source,
        "link_down": LINK.format(4),
        "link_up": LINK.format(4),
        "collectives": "NVLink 300 GB/s each way nominal, times GH200's share in use (not measured)",
    },
)
A100_40 = replace(
    A100,
    name="a100-40-pcie4",
    gpu_memory=40 * GIB,
    gpu_bandwidth=1.32e12,
    sources={
        **A100.sources,
        "gpu_memory": "NVIDIA A100 SXM data sheet, 40 GB",
        "gpu_bandwidth": "NVIDIA data sheet, 1.555 TB/s nominal, times 0.85",
    },
)
B200 = replace(
    H100,
    name="b200-pcie5",
    gpu_memory=180 * GB,
    flops=2250e12,
    gpu_bandwidth=6.8e12,
    collectives=300e9,
    sources={
        **H100.sources,
        "gpu_memory": "NVIDIA DGX B200 data sheet, 1,440 GB for 8 GPUs",
        "flops": "NVIDIA HGX B200 data sheet, bf16 without sparsity",
        "gpu_bandwidth": "NVIDIA DGX B200 data sheet, 8 TB/s nominal, times 0.85",
        "collectives": "NVLink 900 GB/s each way nominal, times GH200's share in use (not measured)",
    },
)
_PCIE4 = {"link_down": LINK.format(4), "link_up": LINK.format(4)}
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
        B200,
        A100,
        A100_40,
        *CARDS,
    )
}

# Words of the names that devices report; the first row with all of its words in the name counts.
_WORDS = (
    ("gb200", "gb200"), ("gh200 144g", "gh200-144"), ("gh200", "gh200-96"), ("b200", "b200-pcie5"),
    ("h200 nvl", "h200-nvl"), ("h200", "h200-pcie5"),
    ("h100 nvl", "h100-nvl"), ("h100 pcie", "h100-card"), ("h100", "h100-pcie5"),
    ("a100 pcie 40gb", "a100-40-card"), ("a100 pcie", "a100-card"), ("a100 40gb", "a100-40-pcie4"),
    ("a100", "a100-pcie4"), ("a10", "a10"), ("a10g", "a10g"), ("a40", "a40"), ("l4", "l4"), ("l40", "l40"),
    ("l40s", "l40s"), ("rtx pro 6000", "rtx-pro-6000"), ("rtx 6000 ada", "rtx-6000-ada"), ("rtx a6000", "rtx-a6000"),
    ("rtx 5090", "rtx-5090"), ("rtx 5080", "rtx-5080"), ("rtx 4090", "rtx-4090"), ("rtx 4080", "rtx-4080"),
    ("rtx 3090", "rtx-3090"),
)  # fmt: skip
_OTHER_CHIPS = {"laptop", "max", "mig"}  # slower chips of the same name; max as in Max-Q


def resembling(device: str) -> Hardware | None:
    """Returns the profile of a device by its name, such as "NVIDIA GeForce RTX 4090"; None without one."""
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    if words & _OTHER_CHIPS:
        return None
    return next((PROFILES[name] for needed, name in _WORDS if set(needed.split()) <= words), None)

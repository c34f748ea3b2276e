"""Lists GPUs on PCI Express without NVLink: GeForce, workstation and server cards, by their vendor's data sheets.

`bf16` is NVIDIA's dense figure with fp32 accumulation, half of what the sheets print "with sparsity". The machines
around them are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from superoffload.tools.plan.machines import GB, Hardware

IN_USE = 0.85  # of a nominal memory bandwidth or link that was not measured
PCIE = {4: 27e9, 5: 54e9}  # x16: 31.5 and 63 GB/s per direction, times IN_USE
LINK = "PCIe {} x16 nominal per direction, times 0.85 for packet overhead (assumption; doctor measures it)"
SHARED_LINK = "half of the link: between GPUs everything goes through host memory (assumption)"


@dataclass(frozen=True)
class Host:
    """Describes a GPU's part of the machine around it, in bytes and bytes per second."""

    memory: float
    bandwidth: float
    memory_source: str
    bandwidth_source: str


DESKTOP = Host(
    64 * GB, 65e9, "64 GB per GPU (assumption)",
    "two channels of DDR5-4800, 77 GB/s nominal, for one GPU, times 0.85 (assumption)",
)  # fmt: skip
DDR5_SERVER = Host(
    256 * GB, 65e9, "2 TB in a server of 8 GPUs (assumption)",
    "two sockets with 8 channels of DDR5-4800, 614 GB/s nominal, for 8 GPUs, times 0.85 (assumption)",
)  # fmt: skip
DDR4_SERVER = Host(
    128 * GB, 43e9, "1 TB in a server of 8 GPUs (assumption)",
    "two sockets of DDR4-3200, 410 GB/s nominal, for 8 GPUs, times 0.85 (assumption)",
)  # fmt: skip


def _card(
    name: str, gigabytes: float, teraflops: float, gb_per_s: float, pcie: int, host: Host, sheet: str
) -> Hardware:
    return Hardware(
        name=name,
        gpu_memory=gigabytes * GB,
        flops=teraflops * 1e12,
        gpu_bandwidth=IN_USE * gb_per_s * GB,
        host_memory=host.memory,
        host_bandwidth=host.bandwidth,
        link_down=PCIE[pcie],
        link_up=PCIE[pcie],
        collectives=PCIE[pcie] / 2,
        gpus_per_node=4 if host is DESKTOP else 8,
        sources={
            "gpu_memory": f"{sheet}, {gigabytes:g} GB",
            "flops": f"{sheet}, bf16 with fp32 accumulation, without sparsity",
            "gpu_bandwidth": f"{sheet}, {gb_per_s:g} GB/s nominal, times 0.85",
            "host_memory": host.memory_source,
            "host_bandwidth": host.bandwidth_source,
            "link_down": LINK.format(pcie),
            "link_up": LINK.format(pcie),
            "collectives": SHARED_LINK,
        },
    )


_AMPERE = "NVIDIA GA102 architecture white paper"
_ADA = "NVIDIA Ada architecture white paper"
_BLACKWELL = "NVIDIA RTX Blackwell architecture white paper"

CARDS = tuple(
    _card(*row)
    for row in (
        ("rtx-3090", 24, 71, 936, 4, DESKTOP, _AMPERE),
        ("rtx-4080", 16, 97.5, 717, 4, DESKTOP, _ADA),
        ("rtx-4090", 24, 165.2, 1008, 4, DESKTOP, _ADA),
        ("rtx-5080", 16, 112.6, 960, 5, DESKTOP, _BLACKWELL),
        ("rtx-5090", 32, 209.5, 1792, 5, DESKTOP, _BLACKWELL),
        ("rtx-a6000", 48, 154.8, 768, 4, DESKTOP, "NVIDIA RTX A6000 data sheet"),
        ("rtx-6000-ada", 48, 364.2, 960, 4, DESKTOP, "NVIDIA RTX 6000 Ada data sheet"),
        ("rtx-pro-6000", 96, 503.8, 1792, 5, DESKTOP, "NVIDIA RTX PRO 6000 Blackwell data sheet"),
        ("a10", 24, 125, 600, 4, DDR4_SERVER, "NVIDIA A10 data sheet"),
        ("a10g", 24, 70, 600, 4, DDR4_SERVER, "NVIDIA A10G data sheet"),
        ("a40", 48, 149.7, 696, 4, DDR4_SERVER, "NVIDIA A40 data sheet"),
        ("l4", 24, 121, 300, 4, DDR5_SERVER, "NVIDIA L4 data sheet"),
        ("l40", 48, 181, 864, 4, DDR5_SERVER, "NVIDIA L40 data sheet"),
        ("l40s", 48, 362, 864, 4, DDR5_SERVER, "NVIDIA L40S data sheet"),
        ("a100-card", 80, 312, 1935, 4, DDR4_SERVER, "NVIDIA A100 PCIe data sheet"),
        ("a100-40-card", 40, 312, 1555, 4, DDR4_SERVER, "NVIDIA A100 PCIe data sheet"),
        ("h100-card", 80, 756, 2000, 5, DDR5_SERVER, "NVIDIA H100 PCIe data sheet"),
        ("h100-nvl", 94, 835, 3900, 5, DDR5_SERVER, "NVIDIA H100 NVL data sheet"),
        ("h200-nvl", 141, 835, 4800, 5, DDR5_SERVER, "NVIDIA H200 NVL data sheet"),
    )
)

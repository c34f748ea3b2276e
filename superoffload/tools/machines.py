"""Lists machines for the planner: a table of GPUs with a usual host around each, and the machine it runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from superoffload.errors import ArgumentError, shown
from superoffload.host.system import System, usable_memory
from superoffload.tools.output import meant

GB, GIB = 10**9, 1 << 30


@dataclass(frozen=True)
class Machine:
    """Describes a machine per GPU, in bytes, operations (bf16) and their rates per second; what is unknown is 0."""

    name: str
    gpu_memory: float = 0.0
    flops: float = 0.0
    gpu_bandwidth: float = 0.0
    link_down: float = 0.0  # from the GPU to the host
    link_up: float = 0.0
    collectives: float = 0.0  # to the other GPUs of its node
    host_memory: float = 0.0
    host_bandwidth: float = 0.0
    gpus_per_node: int = field(default=1, kw_only=True)
    device: str = field(default="", kw_only=True)  # words of the GPU's name


# GPU memory is what nvidia-smi shows, arithmetic the data sheet's dense bf16. Bandwidths are 0.85 of the data sheet's;
# KTH measured those of GH200 ("Harnessing integrated CPU-GPU system memory", 2024). NVLink counts a third of its
# nominal rate, which fits published runs on GH200; other GPUs exchange through host memory, at half of their link.
# Hosts are assumptions: a desktop with two channels of DDR5 for GeForce and RTX, an eighth of a server for the others.
# The first row counts whose last words are all in the device's name.
_TABLE = """
name            GiB  TFLOP/s  GPU-GB/s  down  up  collectives  host-GiB  host-GB/s  GPUs  words
gb200           185    2500      6800   148  187      300         223       210      4    gb200
gh200-96       95.6     989      3400   297  375      150         447       420      4    gh200
b200-pcie5      179    2250      6800    54   54      300         256        65      8    b200
h200-pcie5    140.4     989      4100    54   54      150         256        65      8    h200
h100-card      79.6     756      1700    54   54       27         256        65      8    h100 pcie
h100-pcie5     79.6     989      2850    54   54      150         256        65      8    h100
a100-pcie4       80     312      1730    27   27      100         128        43      8    a100
a10g           22.5      70       510    27   27     13.5         128        43      8    a10g
l40s             45     362       734    27   27     13.5         256        65      8    l40s
rtx-pro-6000   95.6   503.8      1523    54   54       27          64        65      4    rtx pro 6000
rtx-6000-ada     48   364.2       816    27   27     13.5          64        65      4    rtx 6000 ada
rtx-5090       31.8   209.5      1523    54   54       27          64        65      4    rtx 5090
rtx-4090         24   165.2       857    27   27     13.5          64        65      4    rtx 4090
rtx-3090         24      71       796    27   27     13.5          64        65      4    rtx 3090
"""
_UNITS = (GIB, 1e12, GB, GB, GB, GB, GIB, GB)
_OTHER_CHIPS = {"laptop", "max", "mig", "nvl"}  # slower chips of the same name; max as in Max-Q


def _machine(row: str) -> Machine:
    name, *cells = row.split()
    numbers = (float(cell) * unit for cell, unit in zip(cells, _UNITS, strict=False))
    return Machine(name, *numbers, gpus_per_node=int(cells[8]), device=" ".join(cells[9:]))


MACHINES = {machine.name: machine for machine in map(_machine, _TABLE.strip().splitlines()[1:])}


def find_machine(name: str | None, ranks: int, system: System | None = None) -> Machine:
    """Returns a row of the table; without a name this machine, with the memory that is free now for each rank."""
    if name in MACHINES:
        return MACHINES[name]
    if name is not None:
        names = f"{meant(name.lower(), MACHINES)}expected one of {', '.join(MACHINES)}; or leave it out"
        raise ArgumentError(f"hardware={shown(name)}: {names}")
    import torch

    system = system or System()
    memory = float(usable_memory(system) or 0)
    if not torch.cuda.is_available():
        return Machine("this machine, without a GPU", host_memory=memory / ranks, gpus_per_node=ranks)
    gpu, gpus = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    words = set(re.findall(r"[a-z0-9]+", gpu.name.lower()))
    alike = [machine for machine in MACHINES.values() if set(machine.device.split()) <= words]
    known = alike[0] if alike and not words & _OTHER_CHIPS else Machine("")
    memory /= min(ranks, gpus)
    if known.link_down > 100 * GB:  # by NVLink-C2C; there the system counts the GPU's memory as its own
        memory = min(memory, known.host_memory)
    name = f"this machine, {gpu.name}"
    return replace(known, name=name, gpu_memory=float(gpu.total_memory), host_memory=memory, gpus_per_node=gpus)

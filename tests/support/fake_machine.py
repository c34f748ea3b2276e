"""Machines that never were, for `superoffload doctor`: copies of /proc and /sys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from superoffload.host.system import System

# A quiet x86 server with two processors on one node and no limits.
PLAIN: dict[str, str] = {
    "/proc/cpuinfo": "processor: 0\nmodel name\t: Example CPU 9000\n\nprocessor: 1\nmodel name\t: Example CPU 9000\n",
    "/proc/loadavg": "0.10 0.20 0.30 1/200 4000\n",
    "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1\n",
    "/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "/proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-1\n",
    "/proc/self/smaps": "00400000-00401000 r-xp 00000000 08:01 1 /bin/x\nSize: 4 kB\nKernelPageSize:        4 kB\n",
    "/proc/self/limits": "Limit Soft Limit Hard Limit Units\nMax locked memory         unlimited unlimited bytes\n",
    "/proc/self/cgroup": "0::/\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/sys/devices/system/cpu/online": "0-1\n",
    "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list": "0\n",
    "/sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "1\n",
    "/sys/devices/system/cpu/cpu0/cache/index3/size": "32768K\n",
    "/sys/devices/system/node/node0/cpulist": "0-1\n",
    "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  67108864 kB\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}

# A GH200: 72 cores and their memory on node 0, the GPU's memory as node 1 without processors, pages of 64 KiB.
GRACE: dict[str, str] = {
    **PLAIN,
    "/proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
    "/proc/meminfo": "MemTotal: 503316480 kB\nMemAvailable: 490000000 kB\n",
    "/proc/self/status": "Cpus_allowed_list:\t0-71\n",
    "/proc/self/smaps": "aaaa-bbbb r-xp 0 0 0 /bin/x\nKernelPageSize:       64 kB\n",
    "/proc/driver/nvidia/gpus/0009:01:00.0/information": "Model: \t\t NVIDIA GH200 480GB\nIRQ: 100\n",
    "/sys/devices/soc0/soc_id": "jep106:036b:0241\n",
    "/sys/devices/system/cpu/online": "0-71\n",
    "/sys/devices/system/cpu/cpu0/regs/identification/midr_el1": "0x00000000410fd4f0\n",
    "/sys/devices/system/node/node0/cpulist": "0-71\n",
    "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 503316480 kB\n",
    "/sys/devices/system/node/node1/cpulist": "\n",
    "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 99614720 kB\n",
    "/sys/firmware/acpi/tables/MPAM": "MPAM",
}


def make_machine(root: Path, files: Mapping[str, str], changes: Mapping[str, str | None] | None = None) -> System:
    """Writes `files` below `root`; `changes` replaces files, or leaves them out (None)."""
    for name, text in {**files, **(changes or {})}.items():
        if text is not None:
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return System(root)

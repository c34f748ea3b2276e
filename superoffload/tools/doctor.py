"""Runs `superoffload doctor`: what stands in the way of training on this machine, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions
from typing import Any

from superoffload import __version__, kernels
from superoffload.errors import KernelsUnavailable
from superoffload.host import processors as host
from superoffload.host import system as files
from superoffload.host.system import System, as_number
from superoffload.integrations.deepspeed.switch import NEWEST, OLDEST
from superoffload.tools.machines import GIB
from superoffload.tools.output import check_writable, write_json

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_DRIVER = "/proc/driver/nvidia/gpus"
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"
_SUPERCHIP = re.compile("GH200|GB[23]00|GB10")  # in the name of a GPU
# What /proc/cpuinfo calls what the kernels of a set need.
_ISA_FLAGS = {"avx2": "avx2 fma f16c", "avx512": "avx512f avx512bw avx512vl avx512dq", "neon": "asimd", "sve": "sve"}
_PACKAGES: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {  # what needs it; oldest and newest version
    "torch": ("AdamW, FSDP2, DDP", ((2, 6),)),
    "deepspeed": ("DeepSpeed", (OLDEST, NEWEST)),
    "transformers": ("transformers", ((5, 3),)),
    "accelerate": ("transformers", ((1, 10),)),
}


@dataclass(frozen=True)
class Finding:
    """Holds one remark: what is so, and what to do about it if anything should be done."""

    text: str
    remedy: str = ""
    level: str = ""
    topic: str = ""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    about = "Examine this machine and installation, and say what to do. Exits with 1 only if there is a problem."
    parser: argparse.ArgumentParser = subparsers.add_parser("doctor", help="examine this machine", description=about)
    parser.add_argument("--json", metavar="PATH", help="write the findings to this file too")
    return parser


def run(args: argparse.Namespace) -> int:
    check_writable(args.json, "json")
    findings = diagnose(System())
    for one in findings:
        mark = f"{one.topic:<12}{one.level if one.level == OK else one.level.upper():<9}"
        for prefix, text in ((mark, one.text), (" " * 18 + "-> ", one.remedy)):
            for line in textwrap.wrap(text, 95, break_on_hyphens=False):
                print(prefix + line)
                prefix = " " * 21
    problems, warnings = (sum(one.level == level for one in findings) for level in (PROBLEM, WARNING))
    print(f"\n{'not fit to train' if problems else 'fit to train'}; problems: {problems}, warnings: {warnings}")
    counts = {"command": "doctor", "passed": not problems, "problems": problems, "warnings": warnings}
    write_json(args.json, {**counts, "findings": [asdict(one) for one in findings]})
    return 1 if problems else 0


def diagnose(system: System) -> list[Finding]:
    """Examines the machine whose /proc and /sys ``system`` reads; torch and the kernels run on the real one."""
    parts = {"processors": processors, "kernels": instruction_sets, "memory": memory, "NUMA": numa, "GPU": gpus}
    found = [(topic, one) for topic, part in parts.items() for one in part(system)]
    found += [("software", one) for one in software()]
    return [replace(one, topic=topic, level=one.level or (WARNING if one.remedy else OK)) for topic, one in found]


def processors(system: System) -> Iterator[Finding]:
    """Examines what the process may use, or the share of a rank where torchrun says how many are on this node."""
    allowed, quota = allowed_cpus(system), files.cpu_quota(system)
    online = files.parse_cpu_list(system.text("/sys/devices/system/cpu/online")) or allowed
    rank, ranks = (as_number(os.environ.get(name)) or 0 for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    everyone = [host.RankOnNode("", one, tuple(allowed)) for one in range(max(rank + 1, ranks))]
    mine, share = host.share_cpus(everyone, rank), f", the share of rank {rank} of {ranks}" if ranks else ""
    threads, beside = (host.thread_limit(len(mine), os.environ, quota, beside_device=gpu) for gpu in (False, True))
    yield Finding(
        f"{len(allowed)} of {len(online)} usable ({files.format_cpu_list(allowed)}); superoffload.AdamW starts "
        f"{threads} worker threads on {files.format_cpu_list(mine[:threads])}{share}; {beside} for a model on a GPU"
    )
    if len(allowed) < max(2, ranks):
        more = "give the process more (taskset, docker --cpuset-cpus, the job scheduler's cores per task)"
        yield Finding("that is too few for the optimizer's work to run beside backward", more)
    if quota is not None and quota < len(allowed):
        text = f"the control group grants the time of {quota:g} processors; more threads than that take turns"
        remedy = f"raise the quota (docker --cpus); OMP_NUM_THREADS={max(1, int(quota))} bounds torch's threads too"
        yield Finding(text, remedy)
    elif threads == 1 < len(mine) and not host.set_by_torchrun("OMP_NUM_THREADS", os.environ):
        remedy = "unset OMP_NUM_THREADS and SLURM_CPUS_PER_TASK, or pass threads= to superoffload.AdamW"
        yield Finding("the environment allows one worker thread only", remedy)


def allowed_cpus(system: System) -> list[int]:
    """Lists the processors in this process's affinity mask, which also obeys the cpuset of its control group."""
    return files.parse_cpu_list(system.fields("/proc/self/status").get("Cpus_allowed_list")) or host.allowed_cpus()


def instruction_sets(system: System) -> Iterator[Finding]:
    available, current, fields = kernels.available_isas(), kernels.current_isa(), system.fields("/proc/cpuinfo")
    yield Finding(f"{current} in use, out of {', '.join(available)}")
    if current != available[-1]:
        yield Finding(f"{available[-1]} is available and faster", f"unset {kernels.ISA_VARIABLE}")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    lacking = [isa for isa, needs in _ISA_FLAGS.items() if set(needs.split()) <= flags and isa not in available]
    if lacking:
        remedy = "install again without SUPEROFFLOAD_BUILD_ISAS, with g++ >= 11 or clang++ >= 14"
        yield Finding(f"the processor has {', '.join(lacking)}, which this build lacks", remedy)


def memory(system: System) -> Iterator[Finding]:
    usable, limit = files.usable_memory(system), files.memory_limit(system)
    if usable is None:
        yield Finding("the system does not tell how much memory there is", "mount /proc in the container")
        return
    within = f" (the control group's limit is {limit[0] / GIB:.1f} GiB)" if limit else ""
    yield Finding(f"{usable / GIB:.1f} GiB usable{within}; `superoffload plan` says for which models that is enough")
    swap = system.fields("/proc/meminfo")
    swapped = (as_number(swap.get("SwapTotal")) or 0) - (as_number(swap.get("SwapFree")) or 0)
    if swapped > 1 << 20:  # KiB
        text = f"{swapped / 2**20:.1f} GiB are swapped out: a step that meets swapped state waits for the disk"
        yield Finding(text, "make room, then swapoff -a && swapon -a (as root)")
    small_pages = as_number(system.fields("/proc/self/smaps").get("KernelPageSize")) == 4
    if small_pages and "[never]" in (system.text(_HUGE_PAGES) or ""):
        yield Finding("transparent huge pages are off, so memory is slower", f"echo madvise > {_HUGE_PAGES} (as root)")
    if small_pages and _SUPERCHIP.search(driver_gpus(system)):
        yield Finding("pages of 4 KiB make pinning on Grace slow", "boot a kernel with 64 KiB pages (linux-nvidia-64k)")
    locked = re.search(r"Max locked memory +(\d+)", system.text("/proc/self/limits") or "")
    if locked and int(locked[1]) < GIB and driver_gpus(system):
        text = f"locked memory is limited to {int(locked[1]) / 2**20:.3g} MiB: RDMA fails, and pinning for a GPU may"
        yield Finding(text, "ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a unit")


def driver_gpus(system: System) -> str:
    """Lists the GPUs that NVIDIA's driver shows, also without CUDA."""
    return ", ".join(system.fields(f"{_DRIVER}/{one}/information").get("Model", one) for one in system.names(_DRIVER))


def numa(system: System) -> Iterator[Finding]:
    folder, allowed = "/sys/devices/system/node", set(allowed_cpus(system))
    nodes = [name[4:] for name in system.names(folder) if re.fullmatch(r"node\d+", name)]
    own = [one for one in nodes if allowed & set(files.parse_cpu_list(system.text(f"{folder}/node{one}/cpulist")))]
    if len(nodes) > 1:
        yield Finding(f"nodes: {', '.join(nodes)}; this process may run on {', '.join(own or nodes)}")
    if len(own) > 1:
        remedy = f"one process per node: numactl --cpunodebind={own[0]} --membind={own[0]} ..."
        yield Finding("threads on one node read state on another, which is slow", remedy)
    if len(nodes) > 1 and system.number("/proc/sys/kernel/numa_balancing"):
        yield Finding("automatic NUMA balancing slows every step", "sysctl kernel.numa_balancing=0 (as root)")
    near = sorted({cpu for address in system.names(_DRIVER) for cpu in host.cpus_near_gpu(address, system)})
    if near and not allowed & set(near):
        yield Finding("this process may not run next to the GPU", f"taskset -c {files.format_cpu_list(near)} ...")


def gpus(system: System) -> Iterator[Finding]:
    listed, archs = driver_gpus(system), set()
    with suppress(ImportError):  # software() says that it is a problem
        import torch

        from superoffload.links.cuda.compile import compile_kernels

        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            one = torch.cuda.get_device_properties(index)
            archs.add(f"sm_{one.major}{one.minor}")
            link = "NVLink-C2C" if _SUPERCHIP.search(one.name) else "PCIe"
            yield Finding(f"{index}: {one.name}, {one.total_memory / GIB:.0f} GiB, {link}")
    if not archs:
        remedy = "install torch for the CUDA version that nvidia-smi shows, and look at CUDA_VISIBLE_DEVICES"
        yield Finding("torch sees none" + (f"; the driver has {listed}" if listed else ""), remedy if listed else "")
    for address in system.names(_DRIVER):
        folder = f"/sys/bus/pci/devices/{address}"
        width, widest = (system.number(f"{folder}/{kind}_link_width") for kind in ("current", "max"))
        if width and widest and width < widest:
            yield Finding(f"{address}: {width} of {widest} PCIe lanes, slow copies", "look at its slot and riser")
    for arch in sorted(archs):
        try:
            compile_kernels(arch)  # as an optimizer does when it is made; later ones take them from a folder
            yield Finding(f"the kernels for {arch} compile")
        except KernelsUnavailable as error:
            text = f"{error}. So gradients are copied one by one, and placement= is refused"
            yield Finding(text, "install torch's CUDA wheels, superoffload[cuda12] or superoffload[cuda13]")


def software() -> Iterator[Finding]:
    installed = {str(one.name).lower(): one.version for one in distributions()}
    have = {name: installed.get(name) for name in ("numpy", *_PACKAGES)}
    known = {"superoffload": __version__, "Python": platform.python_version(), **have}
    yield Finding(", ".join(f"{name} {found}" for name, found in known.items() if found))
    reasons: dict[str, str] = {}
    for name, (user, bounds) in _PACKAGES.items():
        found, (oldest, *newest) = have[name], bounds
        numbers = tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", found or "")[0])))
        wanted = ">=" + ",<=".join(".".join(map(str, bound)) for bound in bounds)
        if found is None and name != "torch":
            reasons.setdefault(user, f"needs {name}, not installed")
        elif numbers < oldest or any(numbers > last for last in newest):
            needs, level = f"needs {name}{wanted}", PROBLEM if name == "torch" else WARNING
            reasons.setdefault(user, needs)
            yield Finding(f"{user}: {needs}, found {found or 'none'}", f"pip install '{name}{wanted}'", level)
    users = dict.fromkeys(user for user, _ in _PACKAGES.values())
    yield Finding("; ".join(f"{user}: {reasons.get(user, 'works')}" for user in users))

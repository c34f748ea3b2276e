"""Runs `superoffload doctor`: what this machine can do, what is in the way, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from superoffload.errors import ArgumentError
from superoffload.host.control_groups import cpu_quota, usable_memory
from superoffload.host.system import System, as_number, format_cpu_list, parse_cpu_list
from superoffload.tools.output import check_writable, write_json

GIB = 1 << 30
OK, WARNING, PROBLEM = "ok", "WARNING", "PROBLEM"
OLDEST_TORCH = (2, 6)
_GPUS = "/proc/driver/nvidia/gpus"
_SUPERCHIPS = ("gh200", "gb200", "gb300", "grace")


@dataclass(frozen=True)
class Finding:
    """``remedy``: what to do; empty only if nothing needs to be done."""

    level: str
    topic: str
    text: str
    remedy: str = ""


@dataclass
class Report:
    """Collects findings in reading order, and facts by name."""

    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def ok(self, topic: str, text: str) -> None:
        self.findings.append(Finding(OK, topic, text))

    def warn(self, topic: str, text: str, remedy: str, level: str = WARNING) -> None:
        self.findings.append(Finding(level, topic, text, remedy))

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.findings)

    def text(self) -> str:
        lines = []
        for finding in self.findings:
            lines += _wrapped(f"{finding.level:<8} {finding.topic:<12} ", finding.text)
            lines += _wrapped(" " * 22 + "-> ", finding.remedy)
        fit = f"not fit to train: {self.count(PROBLEM)} problems" if self.count(PROBLEM) else "fit to train"
        return "\n".join([*lines, "", f"{fit}, {self.count(WARNING)} warnings"])


def _wrapped(prefix: str, text: str) -> list[str]:
    return textwrap.wrap(text, 116, initial_indent=prefix, subsequent_indent=" " * len(prefix), break_on_hyphens=False)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="examine this machine and this installation",
        description="Examine processors, memory, GPUs and software, and undo a speculated step on every instruction\n"
        "set. Each line is ok, a WARNING or a PROBLEM, with what to do. Exits with 1 only for a problem.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="PATH", help="write facts and findings to this file too")
    parser.add_argument("--root", metavar="PATH", default="/", help="read /proc and /sys below this folder")
    return parser


def run(args: argparse.Namespace) -> int:
    if not Path(args.root).is_dir():
        raise ArgumentError(f"root={args.root}: no such folder; expected one that holds proc and sys")
    check_writable(args.json, "json")
    report = diagnose(System(Path(args.root)), os.environ)
    print(report.text())
    passed = report.count(PROBLEM) == 0
    if args.json:
        findings = [asdict(finding) for finding in report.findings]
        write_json(args.json, {"command": "doctor", "passed": passed, "facts": report.facts, "findings": findings})
    return 0 if passed else 1


def diagnose(system: System, environment: Mapping[str, str]) -> Report:
    report = Report()
    examine_processors(report, system, environment)
    examine_instruction_sets(report, environment)
    examine_memory(report, system)
    examine_nodes(report, system)
    examine_gpus(report, system)
    examine_software(report)
    examine_undo(report)
    return report


def examine_processors(report: Report, system: System, environment: Mapping[str, str]) -> None:
    """A rank of torchrun is told its share of the node."""
    from superoffload.host.processors import RankOnNode, share_cpus, thread_limit

    allowed = parse_cpu_list(system.fields("/proc/self/status").get("Cpus_allowed_list"))
    mine = allowed = allowed or list(range(os.cpu_count() or 1))
    rank, ranks = (as_number(environment.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if rank is not None and ranks is not None and rank < ranks:
        mine = share_cpus([RankOnNode("", other, tuple(allowed)) for other in range(ranks)], rank)
    quota = cpu_quota(system)
    threads = thread_limit(len(mine), environment, quota, beside_device=bool(system.names(_GPUS)))
    report.facts["processors"] = {"usable": len(allowed), "quota": quota, "threads": threads}
    share = f", the share of rank {rank} of {ranks} on this node" if mine != allowed else ""
    report.ok(
        "processors",
        f"{len(allowed)} usable ({format_cpu_list(allowed)}); superoffload.AdamW starts {threads} worker threads, on "
        f"{format_cpu_list(mine[:threads])}{share}",
    )
    if len(allowed) == 1 or (quota is not None and quota <= 1):
        report.warn(
            "processors",
            "one processor for everything: the optimizer cannot hide behind backward, it only takes its time from it",
            "give the process more (taskset, docker --cpus, the job scheduler's cores per task)",
        )
    elif quota is not None and quota < len(allowed):
        report.warn(
            "processors",
            f"the control group grants the time of {quota:g} of {len(allowed)} processors: with a thread on each, the "
            "kernel stops all of them for part of every period",
            f"threads={int(quota)} and OMP_NUM_THREADS={int(quota)}, or raise the quota",
        )
    if ranks is not None and ranks > len(allowed):
        report.warn(
            "processors", f"{ranks} ranks on this node and {len(allowed)} processors", "give each rank some of its own"
        )


def examine_instruction_sets(report: Report, environment: Mapping[str, str]) -> None:
    from superoffload import kernels

    available, current = kernels.available_isas(), kernels.current_isa()
    report.facts["instruction_sets"] = {"available": available, "current": current}
    report.ok("kernels", f"this machine and build have {', '.join(available)}; in use: {current}")
    if current != available[-1]:
        remedy = f"unset {kernels.ISA_VARIABLE}, unless the slower set is meant"
        report.warn("kernels", f"{current} is in use although {available[-1]} is there", remedy)
    elif available == ["scalar"]:
        report.warn(
            "kernels",
            "only the portable kernels can run: right results, but a step is several times slower",
            "use a processor with AVX2, AVX-512, NEON or SVE, or rebuild without SUPEROFFLOAD_BUILD_ISAS",
        )


def examine_memory(report: Report, system: System) -> None:
    from superoffload.engine.journal_reservation import JOURNAL_BYTES_PER_PARAM

    usable = usable_memory(system)
    report.facts["usable_memory_bytes"] = usable
    if usable is None:
        report.warn("memory", "the system does not tell how much there is", "mount /proc in the container")
    else:
        # State, packed bf16 gradient, published bf16 copy, reserved journal (docs/architecture.md).
        sizes = (12 + 4 + JOURNAL_BYTES_PER_PARAM, 6 + 4 + JOURNAL_BYTES_PER_PARAM, 4 + 4 + JOURNAL_BYTES_PER_PARAM)
        plain, bf16, least = (f"{usable / size / 1e9:.1f} B" for size in sizes)
        report.ok(
            "memory",
            f"{usable / GIB:.1f} GiB usable: room for the state of {plain} bf16 parameters ({sizes[0]:g} bytes each), "
            f"with split masters and bf16 moments of {bf16} ({sizes[1]:g}), with 8-bit moments of {least} "
            f"({sizes[2]:g})",
        )
        if usable < 2 * GIB:
            report.warn("memory", "less than 2 GiB", "raise the container's memory limit, or end other programs")
    info = system.fields("/proc/meminfo")
    swapped = (as_number(info.get("SwapTotal")) or 0) - (as_number(info.get("SwapFree")) or 0)
    if swapped > 1 << 20:
        report.warn(
            "memory",
            f"{swapped / 2**20:.1f} GiB are swapped out: a step that meets swapped state waits for the disk",
            "make room, then swapoff -a && swapon -a (as root)",
        )
    page = as_number(system.fields("/proc/self/smaps").get("KernelPageSize"))
    huge = system.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    if page == 4 and "[never]" in huge:
        report.warn(
            "memory",
            "transparent huge pages are off: with pages of 4 KiB, address translation costs part of the bandwidth",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        )
    lines = (system.text("/proc/self/limits") or "").splitlines()
    locked = next((line.split()[3] for line in lines if line.startswith("Max locked memory")), "unlimited")
    if system.names(_GPUS) and locked.isdigit() and int(locked) < GIB:
        report.warn(
            "memory",
            f"locked memory is limited to {int(locked) / 2**20:.3g} MiB: pinning for a GPU and RDMA may fail",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service's unit",
        )


def examine_nodes(report: Report, system: System) -> None:
    """NUMA nodes, and what a Grace processor needs."""
    folder = "/sys/devices/system/node"
    names = [name for name in system.names(folder) if name.removeprefix("node").isdigit()]
    cpus = {name: set(parse_cpu_list(system.text(f"{folder}/{name}/cpulist"))) for name in names}
    mine = set(parse_cpu_list(system.fields("/proc/self/status").get("Cpus_allowed_list")))
    reached = [name.removeprefix("node") for name in names if cpus[name] & mine]
    report.facts["numa_nodes"] = {name: format_cpu_list(sorted(cpus[name])) for name in names}
    if len(reached) > 1:
        report.warn(
            "NUMA",
            f"this process may run on {len(reached)} nodes: worker threads read state across the link between them",
            f"start one process per node: numactl --cpunodebind={reached[0]} --membind={reached[0]} ...",
        )
    if len(names) > 1 and system.number("/proc/sys/kernel/numa_balancing"):
        report.warn(
            "NUMA",
            "automatic balancing is on: the kernel unmaps pages to see who uses them, which slows every pass",
            "sysctl kernel.numa_balancing=0 (as root)",
        )
    report.facts["grace"] = grace = is_grace(system)
    if grace:
        report.ok("Superchip", "a Grace processor; docs/superchips.md says how to set it up")
        if as_number(system.fields("/proc/self/smaps").get("KernelPageSize")) == 4:
            report.warn(
                "Superchip",
                "pages of 4 KiB: pinning and address translation are several times slower than with 64 KiB",
                "boot a kernel built for 64 KiB pages (linux-nvidia-64k), or enable transparent huge pages",
            )
        if "init_on_alloc=1" in (system.text("/proc/cmdline") or "").split():
            report.warn(
                "Superchip",
                "the kernel clears every page when it is allocated: start-up with large state is slow",
                "boot with init_on_alloc=0, as NVIDIA's tuning guide for Grace says",
            )


def is_grace(system: System) -> bool:
    """By the SoC's identification (SMC calling convention), else by Neoverse V2 with such a product's or GPU's name."""
    socs = [name for name in system.names("/sys/devices") if name.startswith("soc")]
    if any((system.text(f"/sys/devices/{name}/soc_id") or "").lower() == "jep106:036b:0241" for name in socs):
        return True
    fields = system.fields("/proc/cpuinfo")
    if (fields.get("CPU implementer", "").lower(), fields.get("CPU part", "").lower()) != ("0x41", "0xd4f"):
        return False
    told = [system.text(f"/sys/class/dmi/id/{name}") or "" for name in ("product_name", "board_name")]
    told += [system.fields(f"{_GPUS}/{name}/information").get("Model", "") for name in system.names(_GPUS)]
    return any(name in text.lower() for name in _SUPERCHIPS for text in told)


def examine_gpus(report: Report, system: System, torch: Any = None) -> None:
    """``torch``: in its place, for tests."""
    if torch is None:
        try:
            import torch
        except ImportError:
            report.ok("GPU", "none: torch is not installed; parameters on the CPU work without one")
            return
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        report.ok("GPU", f"none: {why}; parameters on the CPU work without one")
        return
    report.facts["gpus"] = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        report.facts["gpus"].append(found.name)
        report.ok("GPU", f"{index}: {found.name}, {found.total_memory / GIB:.1f} GiB")
        if hasattr(found, "pci_bus_id"):  # not in every version of torch
            address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            judge_link(report, system, f"/sys/bus/pci/devices/{address}")
    capabilities = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    for major, minor in capabilities:
        judge_compiler(report, f"sm_{major}{minor}")


def judge_link(report: Report, system: System, device: str) -> None:
    width, possible = (as_number(system.text(f"{device}/{kind}_link_width")) for kind in ("current", "max"))
    if width and possible and width < possible:
        report.warn(
            "GPU",
            f"its link has {width} of {possible} PCIe lanes",
            "look at the slot, and at virtualization of the link",
        )


def judge_compiler(report: Report, arch: str) -> None:
    """The kernels are compiled by NVRTC when they are first needed."""
    from superoffload.links.cuda import nvrtc
    from superoffload.links.cuda.compile import closest

    tried: list[str] = []
    for compiler in nvrtc.find(tried):
        try:
            closest(compiler, arch)
            report.ok("GPU", f"kernels for {arch} are compiled by {compiler.described}")
            return
        except nvrtc.CompileError as error:
            tried.append(f"{compiler.name} for {arch}: {error}")
    report.warn(
        "GPU",
        f"no NVRTC that knows {arch}, so no kernels: gradients are copied one by one and summed by the processors, "
        f"with the same result, and placement= is refused (tried: {'; '.join(tried)})",
        "install a torch with CUDA from NVIDIA's wheels, or superoffload[cuda12] or superoffload[cuda13]",
    )


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine_software(report: Report, lookup: Callable[[str], str | None] = installed_version) -> None:
    from superoffload import __version__
    from superoffload.integrations.deepspeed.switch import NEWEST, OLDEST

    packages = ("torch", "numpy", "deepspeed", "transformers", "accelerate")
    have = {package: lookup(package) for package in packages}
    report.facts["versions"] = {"superoffload": __version__, "python": platform.python_version(), **have}
    report.ok("software", ", ".join(f"{name} {value}" for name, value in report.facts["versions"].items() if value))
    torch, remedy = have["torch"], f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"
    if torch is None:
        report.warn("software", "torch is not installed: only the kernels work", remedy, PROBLEM)
    elif release(torch) < OLDEST_TORCH:
        report.warn("software", f"torch {torch} is older than {_dotted(OLDEST_TORCH)}", remedy, PROBLEM)
    known = {"deepspeed": (OLDEST, NEWEST), "transformers": ((5,), None), "accelerate": ((1, 10), None)}
    for package, (oldest, newest) in known.items():
        there = have[package]
        if there and (release(there) < oldest or (newest is not None and release(there) > newest)):
            span = f"{_dotted(oldest)} or newer" if newest is None else f"{_dotted(oldest)} to {_dotted(newest)}"
            report.warn(
                "software", f"{package} {there}: our adapter works with {span}", f"pip install another {package}"
            )


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def release(text: str) -> tuple[int, ...]:
    """Returns the numbers of a version, without what follows them: `2.13.0+cpu` is (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def examine_undo(report: Report) -> None:
    """A step with NaN, Inf, zeros and denormals is speculated, undone and replayed on every instruction set."""
    from superoffload import kernels

    states = {}
    for isa in kernels.available_isas():
        with kernels.using_isa(isa):
            states[isa], exact = undone_and_replayed()
        if not exact:
            report.warn(
                "self-test",
                f"{isa}: undo or replay of a speculated step did not give the bits that it has to",
                f"do not train with it; choose another set with {kernels.ISA_VARIABLE}, and report this",
                PROBLEM,
            )
    if len(set(states.values())) > 1:
        report.warn("self-test", f"{', '.join(states)} give different bits", "do not train here; report this", PROBLEM)
    elif not report.count(PROBLEM):
        report.ok("self-test", f"{', '.join(states)}: a step was undone and replayed, every bit as it has to be")


def undone_and_replayed() -> tuple[bytes, bool]:
    """Returns the state after a replay, and whether undo and replay were exact, on the instruction set in use."""
    import numpy as np

    from superoffload import kernels

    numel = 3 * kernels.BLOCK + 37  # whole blocks and a tail
    draw = np.random.default_rng(20)
    start = draw.standard_normal(numel).astype(np.float32)
    gradient = (0.01 * draw.standard_normal(numel)).astype(np.float32)
    start[:4] = (0.0, -0.0, 1e-42, 3e38)
    gradient[:6] = (0.0, -0.0, 1e-42, np.inf, np.nan, 1e-30)
    bf16 = (gradient.view(np.uint32) >> 16).astype(np.uint16)
    hyper = [kernels.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, step) for step in (1, 2, 3, 4)]
    clipped = kernels.Hyper(1e-3, 0.9, 0.999, 1e-8, 0.01, 4, gradient_factor=0.5)

    def three_steps() -> tuple[list[Any], kernels.Span]:
        state = [start.copy(), np.zeros(numel, np.float32), np.zeros(numel, np.float32)]
        span = kernels.Span(state[0], state[1], state[2], bf16, np.zeros(numel, np.uint16))
        for one in hyper[:3]:
            span.step(one)
        return state, span

    def bits(state: list[Any]) -> bytes:
        return b"".join(array.tobytes() for array in state)

    state, span = three_steps()
    before = bits(state)
    speculated = span.step_journaled(hyper[3]) and bits(state) != before
    span.undo()
    undone = bits(state) == before
    span.step(clipped)
    again, other = three_steps()
    other.step_journaled(hyper[3])
    other.replay(clipped)
    return bits(again), speculated and undone and bits(again) == bits(state)

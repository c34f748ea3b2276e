"""Examines processors: how many this process may use, where they are, and which instruction sets the kernels have."""

from __future__ import annotations

import os

from superoffload import kernels
from superoffload.host.control_groups import cpu_quota
from superoffload.host.system import System, format_cpu_list, parse_cpu_list
from superoffload.tools.doctor.findings import Examination

_ARM_PARTS = {
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd83"): "Neoverse V3-AE",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x4e", "0x010"): "NVIDIA Olympus",
}


def examine_cpu(system: System) -> Examination:
    found = Examination("CPU")
    allowed = allowed_cpus(system)
    online = parse_cpu_list(system.text("/sys/devices/system/cpu/online")) or allowed
    found.facts.update(
        name=cpu_name(system),
        cpus_online=len(online),
        cpus_usable=len(allowed),
        affinity=format_cpu_list(allowed),
        cores_usable=count_cores(system, allowed),
        quota_cpus=cpu_quota(system),
        load_average=_load(system),
    )
    found.ok(
        f"{found.facts['name']}, {len(allowed)} of {len(online)} processors usable ({found.facts['affinity']}), "
        f"on {found.facts['cores_usable']} {'core' if found.facts['cores_usable'] == 1 else 'cores'}"
    )
    _judge_count(found, allowed)
    _judge_affinity(found, allowed, online)
    _judge_load(found, allowed)
    return found


def examine_instruction_sets() -> Examination:
    """Examines what the extension was built with and this processor can run; independent of /proc."""
    found = Examination("instruction sets")
    available, current = kernels.available_isas(), kernels.current_isa()
    found.facts.update(available=available, current=current, override=os.environ.get(kernels.ISA_VARIABLE) or None)
    found.ok(f"this machine and build have {', '.join(available)}; in use: {current}")
    if current != available[-1]:
        found.warn(
            f"{current} is in use although {available[-1]} is available",
            f"unset {kernels.ISA_VARIABLE}, unless the slower set is meant",
        )
    elif available == ["scalar"]:
        found.warn(
            "only the portable scalar kernels can run here: right results, but a step is several times slower",
            "use a processor with AVX2, AVX-512, NEON or SVE, or rebuild without SUPEROFFLOAD_BUILD_ISAS",
        )
    return found


def allowed_cpus(system: System) -> list[int]:
    """Returns the processors in this process's affinity mask, which also obeys the cpuset of its control group."""
    cpus = parse_cpu_list(system.fields("/proc/self/status").get("Cpus_allowed_list"))
    return cpus or list(range(os.cpu_count() or 1))


def cpu_name(system: System) -> str:
    fields = system.fields("/proc/cpuinfo")
    if fields.get("model name"):
        return fields["model name"]
    implementer, part = fields.get("CPU implementer", "").lower(), fields.get("CPU part", "").lower()
    if (implementer, part) in _ARM_PARTS:
        return f"Arm {_ARM_PARTS[implementer, part]}".replace("Arm NVIDIA", "NVIDIA")
    return f"ARM implementer {implementer} part {part}" if part else "unknown processor"


def count_cores(system: System, cpus: list[int]) -> int:
    """Counts processors that share an engine once; if the system does not tell, counts each."""
    siblings = {
        system.text(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus
    }
    return len(siblings)


def _load(system: System) -> float | None:
    words = (system.text("/proc/loadavg") or "").split()
    return float(words[0]) if words else None


def _judge_count(found: Examination, allowed: list[int]) -> None:
    quota = found.facts["quota_cpus"]
    if len(allowed) == 1 or (quota is not None and quota <= 1):
        found.warn(
            "one processor for everything: the optimizer cannot hide behind backward, it only takes its time from it",
            "give the process more processors (taskset, docker --cpus, the job scheduler's cores per task)",
        )
    if quota is not None and quota < len(allowed):
        threads = max(1, int(quota))
        found.warn(
            f"the control group grants {quota:g} processors of time, but {len(allowed)} may be used: with one worker "
            f"thread on each, the kernel stops all of them for part of every period",
            f"pass threads={threads} to superoffload.AdamW, set OMP_NUM_THREADS={threads}, or raise the quota",
        )


def _judge_affinity(found: Examination, allowed: list[int], online: list[int]) -> None:
    if 1 < len(allowed) < len(online):
        found.ok(f"{len(online) - len(allowed)} processors are outside this process's affinity; workers keep off them")
    if found.facts["cores_usable"] < len(allowed):
        found.ok(
            f"{len(allowed)} processors are {found.facts['cores_usable']} cores with hardware threads; "
            f"the optimizer is bound by memory, so threads={found.facts['cores_usable']} is worth a try"
        )


def _judge_load(found: Examination, allowed: list[int]) -> None:
    load = found.facts["load_average"]
    if load is not None and load > 1.5 * len(allowed) + 1:
        found.warn(
            f"load average {load:g} on {len(allowed)} processors: measured figures are those of a busy machine",
            "run doctor again when the machine is quiet",
        )

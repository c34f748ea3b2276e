"""Examines Superchips: a Grace processor, its coherent link to the GPU (NVLink-C2C), and what to set up there."""

from __future__ import annotations

from superoffload.host.system import System, as_number
from superoffload.tools.doctor.findings import Examination

_NEOVERSE_V2 = ("0x41", "0xd4f")  # Grace, and also the processors of two clouds
_GRACE_SOC = "jep106:036b:0241"  # NVIDIA's identification in the terms of the SMC calling convention
_NAMES = ("gh200", "gb200", "gb300", "gb10", "grace")


def is_grace(system: System) -> bool:
    """Recognizes Grace by the SoC's identification, else by the processor's part number and the product's name."""
    socs = "/sys/devices"
    for name in system.names(socs):
        if name.startswith("soc") and (system.text(f"{socs}/{name}/soc_id") or "").lower() == _GRACE_SOC:
            return True
    if not _is_neoverse_v2(system):
        return False
    words = " ".join(system.text(f"/sys/class/dmi/id/{name}") or "" for name in ("product_name", "board_name")).lower()
    gpus = " ".join(gpu_models(system)).lower()
    return any(name in words or name in gpus for name in _NAMES)


def _is_neoverse_v2(system: System) -> bool:
    midr = as_number(system.text("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1"))
    if midr is not None:
        return (hex(midr >> 24 & 0xFF), hex(midr >> 4 & 0xFFF)) == _NEOVERSE_V2
    fields = system.fields("/proc/cpuinfo")
    return (fields.get("CPU implementer", "").lower(), fields.get("CPU part", "").lower()) == _NEOVERSE_V2


def gpu_models(system: System) -> list[str]:
    """Returns the GPUs' names from NVIDIA's driver, without CUDA."""
    folder = "/proc/driver/nvidia/gpus"
    models = [system.fields(f"{folder}/{name}/information").get("Model", "") for name in system.names(folder)]
    return [model for model in models if model]


def has_c2c(system: System) -> bool:
    """Returns whether the link is coherent: the GPU's name says so, with a Grace processor beside it."""
    return is_grace(system) and any(name in model.lower() for model in gpu_models(system) for name in _NAMES)


def examine_superchip(system: System) -> Examination:
    found = Examination("Superchip")
    grace = is_grace(system)
    found.facts.update(grace=grace, neoverse_v2=_is_neoverse_v2(system), nvlink_c2c=has_c2c(system))
    if not grace:
        why = " (Neoverse V2, but nothing says that NVIDIA made it)" if found.facts["neoverse_v2"] else ""
        found.ok(f"not one{why}")
        return found
    found.ok("Grace processor" + (", GPU over NVLink-C2C" if found.facts["nvlink_c2c"] else ""))
    _examine_partitioning(found, system)
    _examine_kernel(found, system)
    return found


def _examine_partitioning(found: Examination, system: System) -> None:
    """Examines MPAM, which shares out memory bandwidth so that 72 streaming cores do not starve the link's copies."""
    supported = system.exists("/sys/firmware/acpi/tables/MPAM")
    mounted = system.exists("/sys/fs/resctrl/info/MB")
    groups = [name for name in system.names("/sys/fs/resctrl") if system.exists(f"/sys/fs/resctrl/{name}/schemata")]
    found.facts.update(mpam=supported, resctrl_mounted=mounted, resctrl_groups=groups)
    if groups:
        found.ok(f"memory partitions (resctrl): {', '.join(groups)}")
    elif mounted:
        found.ok("resctrl is mounted, without a partition of its own; docs/superchips.md says when one pays")
    elif supported:
        found.warn(
            "MPAM is there but resctrl is not mounted: memory bandwidth cannot be shared out between copies and steps",
            "mount -t resctrl resctrl /sys/fs/resctrl (as root), then as docs/superchips.md describes",
        )
    else:
        found.ok("the firmware shows no MPAM, so memory bandwidth cannot be partitioned; nothing depends on it")


def _examine_kernel(found: Examination, system: System) -> None:
    line = (system.text("/proc/cmdline") or "").split()
    found.facts["init_on_alloc"] = next((word for word in line if word.startswith("init_on_alloc=")), None)
    if "init_on_alloc=1" in line:
        found.warn(
            "the kernel clears every page when it is allocated (init_on_alloc=1): start-up with large state is slow",
            "boot with init_on_alloc=0, as NVIDIA's tuning guide for Grace says",
        )
    page = as_number(system.fields("/proc/self/smaps").get("KernelPageSize"))
    if page == 4:
        found.warn(
            "pages of 4 KiB on Grace: pinning and address translation are several times slower than with 64 KiB",
            "boot a kernel built for 64 KiB pages (linux-nvidia-64k), or enable transparent huge pages",
        )

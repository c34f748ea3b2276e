"""Examines host memory: its size, its pages and NUMA nodes, and what limits it."""

from __future__ import annotations

from superoffload.engine.journal_reservation import JOURNAL_BYTES_PER_PARAM
from superoffload.host.control_groups import memory_limit
from superoffload.host.system import System, as_number, format_cpu_list, parse_cpu_list
from superoffload.tools.doctor.cpu import allowed_cpus
from superoffload.tools.doctor.findings import Examination

GIB = 1 << 30
# docs/architecture.md, "Bytes per parameter": state, packed bf16 gradient, bf16 shadow, reserved journal.
HOST_BYTES_PER_PARAM = 12 + 2 + 2 + JOURNAL_BYTES_PER_PARAM
# The same with master_dtype="split" and state_dtype="bf16" or "8bit" (without its scales, a hundredth of a byte).
BF16_HOST_BYTES_PER_PARAM = 2 + 4 + 2 + 2 + JOURNAL_BYTES_PER_PARAM
LEAST_HOST_BYTES_PER_PARAM = 2 + 2 + 2 + 2 + JOURNAL_BYTES_PER_PARAM
_LITTLE_MEMORY = 2 * GIB
_LITTLE_MEMLOCK = 1 * GIB


def examine_memory(system: System) -> Examination:
    found = Examination("memory")
    info = system.fields("/proc/meminfo")
    total, available = (_kibibytes(info.get(name)) for name in ("MemTotal", "MemAvailable"))
    limit, usable = memory_limit(system), usable_bytes(system)
    found.facts.update(
        total_bytes=total,
        available_bytes=available,
        control_group_limit_bytes=limit[0] if limit else None,
        usable_bytes=usable,
        swap_used_bytes=_swap_used(info),
    )
    _judge_size(found, total, limit, usable)
    _examine_pages(found, system)
    _examine_locked(found, system)
    return found


def usable_bytes(system: System) -> int | None:
    """Returns what can be allocated without swapping: the system's own estimate, within the control group's limit."""
    available, limit = _kibibytes(system.fields("/proc/meminfo").get("MemAvailable")), memory_limit(system)
    rooms = [room for room in (available, limit[0] - limit[1] if limit else None) if room is not None]
    return max(0, min(rooms)) if rooms else None


def huge_page_mode(system: System) -> str | None:
    """Returns the mode of transparent huge pages: always, madvise or never; None if the system does not tell."""
    mode = system.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return next((word.strip("[]") for word in mode.split() if word.startswith("[")), None)


def examine_numa(system: System) -> Examination:
    """Examines nodes with processors, nodes with memory only (a GPU's, on Superchips), and balancing between them."""
    found = Examination("NUMA")
    nodes = numa_nodes(system)
    balancing = system.number("/proc/sys/kernel/numa_balancing")
    found.facts.update(nodes=nodes, balancing=balancing)
    if not nodes:
        found.ok("the system shows no NUMA nodes; treated as one node")
        return found
    with_cpus = [node for node in nodes if node["cpus"]]
    mine = set(allowed_cpus(system))
    reached = [node for node in with_cpus if mine & set(parse_cpu_list(str(node["cpus"])))]
    memory_only = [node["node"] for node in nodes if not node["cpus"]]
    found.ok(
        f"{len(with_cpus)} with processors, this process runs on {len(reached)}"
        + (f"; memory without processors: {', '.join(map(str, memory_only))}" if memory_only else "")
    )
    if len(reached) > 1:
        node = reached[0]["node"]
        found.warn(
            f"this process may run on {len(reached)} nodes: state lands on the node that touches it first, and "
            f"worker threads of the others read it across the socket link",
            f"start one process per node: numactl --cpunodebind={node} --membind={node} ... for the first",
        )
    if balancing and len(nodes) > 1:
        found.warn(
            "automatic NUMA balancing is on: the kernel unmaps pages to see who uses them, which slows every pass",
            "sysctl kernel.numa_balancing=0 (as root; or numa_balancing=disable on the kernel command line)",
        )
    return found


def numa_nodes(system: System) -> list[dict[str, object]]:
    nodes: list[dict[str, object]] = []
    for name in system.names("/sys/devices/system/node"):
        number = name.removeprefix("node")
        if name == number or not number.isdigit():
            continue
        folder = f"/sys/devices/system/node/{name}"
        total = None
        for line in (system.text(f"{folder}/meminfo") or "").splitlines():
            _, marker, rest = line.partition("MemTotal:")
            total = _kibibytes(rest) if marker else total
        cpus = format_cpu_list(parse_cpu_list(system.text(f"{folder}/cpulist")))
        nodes.append({"node": int(number), "cpus": cpus, "memory_bytes": total})
    return sorted(nodes, key=lambda node: int(str(node["node"])))


def _kibibytes(text: str | None) -> int | None:
    number = as_number(text)
    return None if number is None else number * 1024


def _swap_used(info: dict[str, str]) -> int:
    return (_kibibytes(info.get("SwapTotal")) or 0) - (_kibibytes(info.get("SwapFree")) or 0)


def _judge_size(found: Examination, total: int | None, limit: tuple[int, int] | None, usable: int | None) -> None:
    if usable is None:
        found.warn("the system does not tell how much memory there is", "mount /proc in the container")
        return
    text = f"{usable / GIB:.1f} GiB usable"
    if total:
        text += f" of {total / GIB:.1f}"
    if limit:
        text += f", the control group's limit is {limit[0] / GIB:.1f} GiB"
    sizes = (HOST_BYTES_PER_PARAM, BF16_HOST_BYTES_PER_PARAM, LEAST_HOST_BYTES_PER_PARAM)
    plain, bf16, least = (f"{usable / size / 1e9:.1f} B" for size in sizes)
    found.ok(
        f"{text}: room for the state of {plain} bf16 parameters ({sizes[0]:g} bytes each); with split masters and bf16 "
        f"moments {bf16} ({sizes[1]:g}), or 8-bit moments {least} ({sizes[2]:g})"
    )
    if usable < _LITTLE_MEMORY:
        found.warn(
            f"only {usable / GIB:.2f} GiB can be allocated before the kernel ends processes",
            "raise the container's memory limit, or end other programs",
        )
    if found.facts["swap_used_bytes"] > GIB:
        found.warn(
            f"{found.facts['swap_used_bytes'] / GIB:.1f} GiB are swapped out: a step that meets swapped state waits "
            f"for the disk",
            "make room, then swapoff -a && swapon -a (as root)",
        )


def _examine_pages(found: Examination, system: System) -> None:
    page = _kibibytes(system.fields("/proc/self/smaps").get("KernelPageSize"))
    chosen = huge_page_mode(system)
    reserved = as_number(system.fields("/proc/meminfo").get("HugePages_Total"))
    found.facts.update(page_bytes=page, transparent_huge_pages=chosen, huge_pages_reserved=reserved)
    if page is None and chosen is None:
        found.ok("page size and huge pages are not shown by this system")
        return
    text = f"pages of {page // 1024} KiB" if page else "page size not shown"
    found.ok(f"{text}; transparent huge pages: {chosen or 'not shown'}")
    if chosen == "never" and page == 4096:
        found.warn(
            "transparent huge pages are off: with pages of 4 KiB, address translation costs part of the bandwidth",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
        )


def _examine_locked(found: Examination, system: System) -> None:
    limit = None
    for line in (system.text("/proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            limit = line.split()[3]
    found.facts["memlock_bytes"] = int(limit) if limit and limit.isdigit() else limit
    if limit is None:
        found.ok("the limit on locked memory is not shown by this system")
    elif limit.isdigit() and int(limit) < _LITTLE_MEMLOCK:
        found.warn(
            f"locked memory is limited to {int(limit) / 2**20:.3g} MiB: RDMA between nodes fails with it, and so may "
            f"pinning for a GPU; parameters on the CPU do not need it",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service's unit",
        )
    else:
        found.ok("locked memory: " + (f"{int(limit) / GIB:.1f} GiB" if limit.isdigit() else limit))

"""Examines worker threads: where an optimizer would put them, and what limits them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from superoffload.host.control_groups import cpu_quota
from superoffload.host.processors import (
    LIMITING_VARIABLES,
    RankOnNode,
    cpus_near_gpu,
    set_by_torchrun,
    share_cpus,
    thread_limit,
)
from superoffload.host.system import System, format_cpu_list
from superoffload.tools.doctor.cpu import allowed_cpus
from superoffload.tools.doctor.findings import Examination

_DRIVER = "/proc/driver/nvidia/gpus"


def examine_threads(system: System, environment: Mapping[str, str] = os.environ) -> Examination:
    """Examines the process, or a rank's share if a launcher says how many ranks are on this node (torchrun)."""
    found = Examination("worker threads")
    allowed = allowed_cpus(system)
    rank, ranks = (_number(environment.get(name)) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    mine = allowed
    if rank is not None and ranks is not None and rank < ranks:
        mine = share_cpus([RankOnNode("", other, tuple(allowed)) for other in range(ranks)], rank)
    quota = cpu_quota(system)
    threads = thread_limit(len(mine), environment, quota)
    beside_gpu = thread_limit(len(mine), environment, quota, beside_device=True)
    found.facts.update(
        threads=threads,
        threads_beside_gpu=beside_gpu,
        cpus=format_cpu_list(mine[:threads]),
        rank=rank,
        ranks_on_this_node=ranks,
        environment={name: environment[name] for name in LIMITING_VARIABLES if name in environment},
        near_gpus={address: format_cpu_list(list(cpus_near_gpu(address, system))) for address in _gpus(system)},
    )
    text = f"superoffload.AdamW starts {threads} of them here, on processors {found.facts['cpus']}"
    if ranks is not None and rank is not None:
        text += f": the share of rank {rank} of {ranks} on this node, if all may use the same processors"
    found.ok(text)
    if beside_gpu != threads and system.names(_DRIVER):
        found.ok(
            f"for parameters on a GPU {beside_gpu}: the other processors are left to the threads that feed and follow "
            "it; threads= overrides"
        )
    for name, value in found.facts["environment"].items():
        if set_by_torchrun(name, environment):
            found.ok(f"{name}={value} is torchrun's own default, which does not bound them")
        else:
            found.ok(f"{name}={value} is taken into account")
    for address, cpus in found.facts["near_gpus"].items():
        found.ok(f"next to GPU {address}: processors {cpus}; a rank on that GPU gets these first")
    if ranks is not None and ranks > len(allowed):
        found.warn(
            f"{ranks} ranks on this node and {len(allowed)} processors: some ranks share one",
            "give the job more processors per rank (the job scheduler's cores per task, torchrun --nproc-per-node)",
        )
    return found


def _gpus(system: System) -> list[str]:
    """Returns PCI addresses of NVIDIA GPUs that their driver lists and that have known neighbours."""
    names = system.names(_DRIVER)
    return [name for name in names if cpus_near_gpu(name, system)]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None

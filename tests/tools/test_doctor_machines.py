"""`superoffload doctor`: what it sees of processors and memory of other machines, and in containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from superoffload.host.control_groups import cpu_quota, memory_limit
from superoffload.host.system import System
from superoffload.tools.doctor.cpu import examine_cpu
from superoffload.tools.doctor.examine import diagnose
from superoffload.tools.doctor.findings import WARNING
from superoffload.tools.doctor.host_memory import examine_memory, examine_numa
from superoffload.tools.doctor.superchip import examine_superchip, is_grace
from tests.support.fake_machine import GRACE, PLAIN, NoGpu, make_machine, one_warning, warnings_of

GIB = 1 << 30


def test_plain_machine_has_nothing_to_remark(tmp_path: Path) -> None:
    diagnosis = diagnose(make_machine(tmp_path, PLAIN), NoGpu(), measure_bandwidth=False)
    assert (
        diagnosis.passed and [f.text for f in diagnosis.findings if f.level == WARNING and f.topic != "software"] == []
    )
    facts = {found.topic: found.facts for found in diagnosis.examinations}
    assert facts["CPU"]["name"] == "Example CPU 9000" and facts["CPU"]["cores_usable"] == 2
    assert facts["memory"]["page_bytes"] == 4096 and facts["memory"]["memlock_bytes"] == "unlimited"
    assert facts["GPU"]["devices"] == [] and facts["Superchip"]["grace"] is False


def test_nothing_readable_is_no_problem(tmp_path: Path) -> None:
    """A sandbox without /proc and /sys: doctor says what it cannot see and goes on."""
    diagnosis = diagnose(System(tmp_path), NoGpu(), measure_bandwidth=False)
    assert diagnosis.passed
    assert any("no NUMA nodes" in finding.text for finding in diagnosis.findings)
    assert any("does not tell how much memory" in finding.text for finding in diagnosis.findings)


def test_low_locked_memory(tmp_path: Path) -> None:
    limits = "Limit Soft Limit Hard Limit Units\nMax locked memory         65536 65536 bytes\n"
    found = examine_memory(make_machine(tmp_path, PLAIN, {"/proc/self/limits": limits}))
    assert "limited to 0.0625 MiB" in one_warning(found) and "memlock=-1" in one_warning(found)
    assert found.facts["memlock_bytes"] == 65536


def test_one_core(tmp_path: Path) -> None:
    found = examine_cpu(make_machine(tmp_path, PLAIN, {"/proc/self/status": "Cpus_allowed_list:\t1\n"}))
    assert found.facts["cpus_usable"] == 1 and found.facts["affinity"] == "1"
    assert "cannot hide behind backward" in one_warning(found)


def test_hardware_threads_count_once(tmp_path: Path) -> None:
    siblings = {f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1\n" for cpu in (0, 1)}
    found = examine_cpu(make_machine(tmp_path, PLAIN, siblings))
    assert found.facts["cores_usable"] == 1 and found.facts["cpus_usable"] == 2


def test_busy_machine(tmp_path: Path) -> None:
    assert "busy machine" in one_warning(
        examine_cpu(make_machine(tmp_path, PLAIN, {"/proc/loadavg": "9.5 8 7 1/2 3\n"}))
    )


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # the tightest of the groups around the process counts
        (
            {
                "/proc/self/cgroup": "0::/pod/container\n",
                "/sys/fs/cgroup/pod/cpu.max": "120000 100000\n",
                "/sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
            },
            1.2,
        ),
        # version 1
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/job\n",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
    ],
)
def test_processor_quota(tmp_path: Path, files: Mapping[str, str], quota: float | None) -> None:
    system = make_machine(tmp_path, PLAIN, files)
    assert cpu_quota(system) == quota
    texts = warnings_of(examine_cpu(system))
    assert any("grants" in text and "threads=1" in text for text in texts) == (quota is not None)
    assert any("one processor for everything" in text for text in texts) == (quota == 0.5)


@pytest.mark.parametrize(
    "files, limit",
    [
        ({"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n"}, 4 * GIB),
        ({"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "0\n"}, None),
        (
            {
                "/proc/self/cgroup": "9:memory:/job\n",
                "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
                "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            4 * GIB,
        ),
    ],
)
def test_memory_limit_of_a_container(tmp_path: Path, files: Mapping[str, str], limit: int | None) -> None:
    system = make_machine(tmp_path, PLAIN, files)
    found = examine_memory(system)
    assert found.facts["control_group_limit_bytes"] == limit
    if limit is None:
        assert memory_limit(system) is None and found.facts["usable_bytes"] == 60000000 * 1024
        assert warnings_of(found) == []
        room = "3.4 B bf16 parameters (18 bytes each)"
        leaner = "with split masters and bf16 moments 5.1 B (12), or 8-bit moments 6.1 B (10)"
        assert any(f"{room}; {leaner}" in said.text for said in found.findings), "of 60,000,000 KiB"
    else:
        assert found.facts["usable_bytes"] == GIB
        assert "only 1.00 GiB" in one_warning(found) and "container's memory limit" in one_warning(found)


def test_no_numa_information(tmp_path: Path) -> None:
    changes = {name: None for name in PLAIN if "/node/" in name}
    found = examine_numa(make_machine(tmp_path, PLAIN, changes))
    assert found.facts["nodes"] == [] and warnings_of(found) == []


def test_process_on_two_nodes(tmp_path: Path) -> None:
    changes = {
        "/sys/devices/system/node/node0/cpulist": "0\n",
        "/sys/devices/system/node/node1/cpulist": "1\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
    }
    texts = warnings_of(examine_numa(make_machine(tmp_path, PLAIN, changes)))
    assert len(texts) == 2
    assert "numactl --cpunodebind=0 --membind=0" in texts[0] and "kernel.numa_balancing=0" in texts[1]


def test_huge_pages_off_and_swapping(tmp_path: Path) -> None:
    changes = {
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "/proc/meminfo": "MemAvailable: 60000000 kB\nSwapTotal: 8388608 kB\nSwapFree: 4194304 kB\n",
    }
    texts = warnings_of(examine_memory(make_machine(tmp_path, PLAIN, changes)))
    assert "4.0 GiB are swapped out" in texts[0] and "transparent_hugepage/enabled" in texts[1]


def test_grace(tmp_path: Path) -> None:
    system = make_machine(tmp_path, GRACE)
    assert is_grace(system)
    assert examine_cpu(system).facts["name"] == "Arm Neoverse V2"
    superchip = examine_superchip(system)
    assert superchip.facts["nvlink_c2c"] is True
    assert "mount -t resctrl" in one_warning(superchip)
    numa = examine_numa(system)
    assert "memory without processors: 1" in numa.findings[0].text and warnings_of(numa) == []
    assert examine_memory(system).facts["page_bytes"] == 65536


def test_grace_as_it_should_not_be_set_up(tmp_path: Path) -> None:
    changes = {
        "/proc/cmdline": "root=/dev/sda1 init_on_alloc=1\n",
        "/proc/self/smaps": "KernelPageSize: 4 kB\n",
        "/sys/fs/resctrl/info/MB/bandwidth_gran": "10\n",
        "/sys/fs/resctrl/training/schemata": "MB:0=100\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
    }
    system = make_machine(tmp_path, GRACE, changes)
    superchip = examine_superchip(system)
    assert superchip.facts["resctrl_groups"] == ["training"]
    texts = warnings_of(superchip)
    assert len(texts) == 2 and "init_on_alloc=0" in texts[0] and "64 KiB pages" in texts[1]
    assert "kernel.numa_balancing=0" in one_warning(examine_numa(system))


@pytest.mark.parametrize(
    "changes, grace",
    [
        ({"/sys/devices/soc0/soc_id": None}, True),  # by the part number and the GPU's name
        ({"/sys/devices/soc0/soc_id": None, "/proc/driver/nvidia/gpus/0009:01:00.0/information": None}, False),
        (
            {
                "/sys/devices/soc0/soc_id": None,
                "/proc/driver/nvidia/gpus/0009:01:00.0/information": None,
                "/sys/class/dmi/id/product_name": "Grace CPU Superchip\n",
            },
            True,
        ),
        ({"/sys/devices/soc0/soc_id": None, "/sys/devices/system/cpu/cpu0/regs/identification/midr_el1": None}, True),
    ],
)
def test_neoverse_v2_alone_is_not_grace(tmp_path: Path, changes: Mapping[str, str | None], grace: bool) -> None:
    found = examine_superchip(make_machine(tmp_path, GRACE, changes))
    assert found.facts["grace"] is grace and found.facts["neoverse_v2"] is True


def test_arm_processor_without_a_known_name(tmp_path: Path) -> None:
    system = make_machine(tmp_path, PLAIN, {"/proc/cpuinfo": "CPU implementer : 0x99\nCPU part : 0x123\n"})
    assert examine_cpu(system).facts["name"] == "ARM implementer 0x99 part 0x123"

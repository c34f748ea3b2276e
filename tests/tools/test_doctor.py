"""`superoffload doctor`: this machine, other machines, containers, GPUs, software, and what it calls a problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from superoffload import kernels
from superoffload.host.control_groups import cpu_quota, usable_memory
from superoffload.host.system import System, format_cpu_list, parse_cpu_list
from superoffload.tools import doctor
from superoffload.tools.cli import EXIT_USAGE, main
from superoffload.tools.doctor import OK, PROBLEM, WARNING, Report, release
from tests.support.fake_machine import GRACE, PLAIN, make_machine, one_warning, warnings_of

GIB = 1 << 30


def report_of(examine: Callable[..., None], *arguments: Any, **settings: Any) -> Report:
    report = Report()
    examine(report, *arguments, **settings)
    return report


# ---- this machine, for real ----


def test_this_machine_is_fit_and_every_finding_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(out)]) == 0
    shown, values = capsys.readouterr().out, json.loads(out.read_text())
    assert values["passed"] and values["facts"]["instruction_sets"]["current"] == kernels.current_isa()
    assert values["facts"]["versions"]["torch"] and values["facts"]["usable_memory_bytes"] > GIB / 4
    for finding in values["findings"]:
        assert finding["level"] in (OK, WARNING) and finding["text"]
        assert bool(finding["remedy"]) == (finding["level"] != OK)
    assert f"self-test    {', '.join(kernels.available_isas())}: a step was undone" in shown
    assert max(map(len, shown.splitlines())) <= 116


def test_one_processor(tmp_path: Path) -> None:
    """The limit is a real one, of a process of its own."""
    script = (
        "import os, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from superoffload.tools.cli import main\n"
        "sys.exit(main(['doctor', '--json', sys.argv[1]]))"
    )
    out = tmp_path / "doctor.json"
    done = subprocess.run([sys.executable, "-c", script, str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    assert values["facts"]["processors"] == {"usable": 1, "quota": values["facts"]["processors"]["quota"], "threads": 1}
    assert any("one processor for everything" in finding["text"] for finding in values["findings"])


def test_a_machine_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nfrom superoffload.tools.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "none: torch is not installed" in done.stdout, done.stderr
    assert "every bit as it has to be" in done.stdout


def test_missing_root_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", "/no/such/folder"]) == 2
    assert "root=/no/such/folder: no such folder" in capsys.readouterr().err


def test_an_instruction_set_that_is_not_here_ends_the_command_in_one_line() -> None:
    """Forced in the environment, where the kernels meet it when they are first imported."""
    environment = {**os.environ, kernels.ISA_VARIABLE: "mmx"}
    command = [sys.executable, "-m", "superoffload", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"superoffload: error: {kernels.ISA_VARIABLE}=mmx: ")


@pytest.mark.parametrize("replay_too", [False, True])
def test_an_inexact_undo_fails_the_command(
    replay_too: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An undo that leaves one master one unit in the last place off, as inverse arithmetic would; also one whose replay
    agrees with it."""
    honest, isa = kernels.Span.undo, kernels.current_isa()

    def inexact(span: kernels.Span) -> None:
        honest(span)
        span._arrays["master"].view("uint32")[1000] ^= 1

    def replay(span: kernels.Span, hyper: kernels.Hyper) -> None:
        span.undo()
        span.step(hyper)

    monkeypatch.setattr(kernels.Span, "undo", inexact)
    if replay_too:
        monkeypatch.setattr(kernels.Span, "replay", replay)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("PROBLEM  self-test") == len(kernels.available_isas()) and "not fit to train" in shown
    assert kernels.current_isa() == isa


def test_sets_that_disagree_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    if len(kernels.available_isas()) < 2:
        pytest.skip("needs two instruction sets to disagree")
    calls = iter(range(100))
    monkeypatch.setattr(doctor, "undone_and_replayed", lambda: (bytes([next(calls)]), True))
    (finding,) = report_of(doctor.examine_undo).findings
    assert finding.level == PROBLEM and "give different bits" in finding.text


# ---- other machines ----


def test_plain_machine_has_nothing_to_remark(tmp_path: Path) -> None:
    report = doctor.diagnose(make_machine(tmp_path, PLAIN), {})
    assert [finding for finding in report.findings if finding.level != OK and finding.topic != "software"] == []
    room = "3.4 B bf16 parameters (18 bytes each), with split masters and bf16 moments of 5.1 B (12), with"
    assert any(f"{room} 8-bit moments of 6.1 B (10)" in finding.text for finding in report.findings), (
        "of 60,000,000 KiB"
    )
    assert report.facts["grace"] is False and report.facts["usable_memory_bytes"] == 60_000_000 * 1024


def test_nothing_readable_is_no_problem(tmp_path: Path) -> None:
    """A sandbox without /proc and /sys: doctor says what it cannot see and goes on."""
    report = doctor.diagnose(System(tmp_path), {})
    assert report.count(PROBLEM) == 0
    assert any("does not tell how much there is" in finding.text for finding in report.findings)


def test_the_share_of_a_rank(tmp_path: Path) -> None:
    system = make_machine(tmp_path, GRACE)
    torchrun = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    text = report_of(doctor.examine_processors, system, torchrun).findings[0].text
    assert "16 worker threads, on 18-33, the share of rank 1 of 4" in text, "two are left for what feeds the GPU"
    crowded = report_of(doctor.examine_processors, system, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "73"})
    assert "73 ranks on this node and 72 processors" in one_warning(crowded)


@pytest.mark.parametrize(
    ("files", "quota"),
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
            },
            0.5,
        ),
    ],
)
def test_processor_quota(tmp_path: Path, files: Mapping[str, str], quota: float | None) -> None:
    system = make_machine(tmp_path, PLAIN, files)
    assert cpu_quota(system) == quota
    texts = warnings_of(report_of(doctor.examine_processors, system, {}))
    said = {None: [], 0.5: ["one processor for everything"]}.get(quota, ["grants the time of"])
    assert [word in text for word, text in zip(said, texts, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    "files",
    [
        {"/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n"},
        {
            "/proc/self/cgroup": "9:memory:/job\n",
            "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    ],
)
def test_memory_limit_of_a_container(tmp_path: Path, files: Mapping[str, str]) -> None:
    system = make_machine(tmp_path, PLAIN, files)
    assert usable_memory(system) == GIB
    assert "container's memory limit" in one_warning(report_of(doctor.examine_memory, system))
    unlimited = make_machine(tmp_path / "b", PLAIN, {"/sys/fs/cgroup/memory.max": "max\n"})
    assert usable_memory(unlimited) == 60_000_000 * 1024


def test_pages_swap_and_locked_memory(tmp_path: Path) -> None:
    changes = {
        "/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "/proc/meminfo": "MemAvailable: 60000000 kB\nSwapTotal: 8388608 kB\nSwapFree: 4194304 kB\n",
        "/proc/self/limits": "Limit Soft Limit Hard Limit Units\nMax locked memory         65536 65536 bytes\n",
    }
    texts = warnings_of(report_of(doctor.examine_memory, make_machine(tmp_path, PLAIN, changes)))
    assert len(texts) == 2 and "4.0 GiB are swapped out" in texts[0] and "transparent_hugepage" in texts[1]
    locked = {"/proc/self/limits": changes["/proc/self/limits"]}
    gpu = report_of(doctor.examine_memory, make_machine(tmp_path / "gpu", GRACE, locked))
    assert "limited to 0.0625 MiB" in one_warning(gpu) and "memlock=-1" in one_warning(gpu)


def test_process_on_two_nodes(tmp_path: Path) -> None:
    changes = {
        "/sys/devices/system/node/node0/cpulist": "0\n",
        "/sys/devices/system/node/node1/cpulist": "1\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
    }
    texts = warnings_of(report_of(doctor.examine_nodes, make_machine(tmp_path, PLAIN, changes)))
    assert len(texts) == 2
    assert "numactl --cpunodebind=0 --membind=0" in texts[0] and "kernel.numa_balancing=0" in texts[1]


NO_SOC = {"/sys/devices/soc0/soc_id": None}
NO_GPU = {"/proc/driver/nvidia/gpus/0009:01:00.0/information": None}


@pytest.mark.parametrize(
    ("changes", "grace"),
    [
        ({}, True),
        (NO_SOC, True),  # by the part number and the GPU's name
        ({**NO_SOC, **NO_GPU}, False),
        ({**NO_SOC, **NO_GPU, "/sys/class/dmi/id/product_name": "Grace CPU Superchip\n"}, True),
    ],
)
def test_neoverse_v2_alone_is_not_grace(tmp_path: Path, changes: Mapping[str, str | None], grace: bool) -> None:
    report = report_of(doctor.examine_nodes, make_machine(tmp_path, GRACE, changes))
    assert report.facts["grace"] is grace and warnings_of(report) == []


def test_grace_as_it_should_not_be_set_up(tmp_path: Path) -> None:
    changes = {"/proc/cmdline": "root=/dev/sda1 init_on_alloc=1\n", "/proc/self/smaps": "KernelPageSize: 4 kB\n"}
    texts = warnings_of(report_of(doctor.examine_nodes, make_machine(tmp_path, GRACE, changes)))
    assert len(texts) == 2 and "64 KiB pages" in texts[0] and "init_on_alloc=0" in texts[1]


# ---- GPUs and software ----


def torch_with(**properties: Any) -> Any:
    """As much of torch as doctor asks."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(name="Example H100", total_memory=80 * GIB, **properties),
        get_device_capability=lambda index: (9, 0),
    )
    return SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))


def test_gpu_with_half_of_its_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "judge_compiler", lambda report, arch: report.ok("GPU", arch))
    link = "/sys/bus/pci/devices/0000:17:00.0"
    system = make_machine(tmp_path, PLAIN, {f"{link}/current_link_width": "8\n", f"{link}/max_link_width": "16\n"})
    address = {"pci_domain_id": 0, "pci_bus_id": 0x17, "pci_device_id": 0}
    report = report_of(doctor.examine_gpus, system, torch_with(**address))
    assert report.facts["gpus"] == ["Example H100"] and "80.0 GiB" in report.findings[0].text
    assert "8 of 16 PCIe lanes" in one_warning(report) and report.findings[-1].text == "sm_90"
    assert warnings_of(report_of(doctor.examine_gpus, make_machine(tmp_path / "b", PLAIN), torch_with())) == []


def test_versions_that_an_adapter_does_not_work_with() -> None:
    versions = {"torch": "2.13.0+cpu", "deepspeed": "0.18.0", "transformers": "5.1.0", "accelerate": "1.10"}
    assert warnings_of(report_of(doctor.examine_software, versions.get)) == []
    others = {**versions, "deepspeed": "0.20.0", "transformers": "4.57.0"}
    texts = warnings_of(report_of(doctor.examine_software, others.get))
    assert "deepspeed 0.20.0: our adapter works with 0.18.0 to 0.19.8" in texts[0], "enable() refuses it"
    assert "transformers 4.57.0: our adapter works with 5 or newer" in texts[1] and len(texts) == 2


@pytest.mark.parametrize(("torch", "text"), [(None, "not installed"), ("2.5.1", "older than 2.6")])
def test_without_a_usable_torch_nothing_trains(torch: str | None, text: str) -> None:
    report = report_of(doctor.examine_software, lambda name: torch if name == "torch" else None)
    (problem,) = (finding for finding in report.findings if finding.level == PROBLEM)
    assert text in problem.text and "pip install" in problem.remedy


def test_slower_instruction_set_by_choice_is_said() -> None:
    if len(kernels.available_isas()) < 2:
        pytest.skip("needs a second instruction set")
    with kernels.using_isa("scalar"):
        report = report_of(doctor.examine_instruction_sets, {})
    assert "scalar is in use although" in one_warning(report) and kernels.ISA_VARIABLE in one_warning(report)


# ---- small parts ----


def test_processor_lists_both_ways() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert format_cpu_list([11, 10, 8, 3, 2, 1, 0]) == "0-3,8,10-11"
    assert parse_cpu_list("") == [] and format_cpu_list([]) == "" and parse_cpu_list(None) == []


def test_releases_compare_by_their_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0) and release("0.19.8rc1") == (0, 19, 8)
    assert release("2.6") >= (2, 6) > release("2.5.9")

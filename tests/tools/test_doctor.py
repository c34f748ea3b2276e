"""`superoffload doctor`: what it finds on recorded machines, what it calls a problem, its exit status and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from superoffload import kernels
from superoffload.errors import KernelsUnavailable
from superoffload.host.system import System, cpu_quota, usable_memory
from superoffload.tools import doctor
from superoffload.tools.cli import EXIT_USAGE, main
from superoffload.tools.doctor import OK, PROBLEM, WARNING, Finding
from tests.support.fake_machine import GRACE, PLAIN, make_machine

GIB = 1 << 30
ENVIRONMENT = ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")
GPU = {"/proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t NVIDIA H100 80GB HBM3\n"}
PCI = "/sys/bus/pci/devices/0000:17:00.0"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 as torch shows it, whose kernels compile."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("superoffload.links.cuda.compile.compile_kernels", lambda arch: b"")


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    found = [SimpleNamespace(name=name, version=number) for name, number in versions.items()]
    monkeypatch.setattr(doctor, "distributions", lambda: found)


def warnings_on(system: System) -> list[Finding]:
    """What the machine's own parts say; software is that of this installation."""
    return [one for one in doctor.diagnose(system) if one.level != OK and one.topic != "software"]


def one_warning(root: Path, files: Mapping[str, str], changes: Mapping[str, str | None]) -> Finding:
    (found,) = warnings_on(make_machine(root, files, changes))
    assert found.level == WARNING and found.remedy
    return found


# ---- this machine, for real ----


def test_this_machine_is_fit_and_its_findings_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    shown, values = capsys.readouterr().out, json.loads((tmp_path / "doctor.json").read_text())
    assert values["passed"] and values["problems"] == 0
    levels = [finding["level"] for finding in values["findings"]]
    assert set(levels) <= {OK, WARNING} and values["warnings"] == levels.count(WARNING) == shown.count("WARNING")
    assert all(bool(finding["remedy"]) == (finding["level"] != OK) for finding in values["findings"])
    assert max(map(len, shown.splitlines())) <= 120


def test_the_command_examines_a_machine_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nfrom superoffload.tools.cli import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "torch sees none" in done.stdout, done.stderr


def test_an_instruction_set_that_is_not_here_ends_the_command_in_one_line() -> None:
    environment = {**os.environ, kernels.ISA_VARIABLE: "mmx"}
    command = [sys.executable, "-m", "superoffload", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr.startswith(f"superoffload: error: {kernels.ISA_VARIABLE}=mmx: ") and done.stderr.count("\n") == 1


def test_versions_decide_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"torch": "2.13.0+cpu", "numpy": "2.4", "deepspeed": "0.18.0", "transformers": "5.3.0", "accelerate": "1.10"}
    installed(monkeypatch, **good)
    assert [one.remedy for one in doctor.software()] == ["", ""]
    for name, number, remedy in (
        ("deepspeed", "0.20.0", "'deepspeed>=0.18.0,<=0.19.8'"),
        ("transformers", "5.2.0", "'transformers>=5.3'"),
    ):
        installed(monkeypatch, **{**good, name: number})
        (warning,) = (one for one in doctor.software() if one.remedy)
        assert remedy in warning.remedy and number in warning.text and warning.level == WARNING


@pytest.mark.parametrize("versions", [{}, {"torch": "2.5.1+cu124"}])
def test_without_a_usable_torch_nothing_trains(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, **versions)
    (problem,) = (one for one in doctor.software() if one.level == PROBLEM)
    assert "torch>=2.6" in problem.remedy and main(["doctor"]) == 1


# ---- processors and memory of recorded machines ----


@pytest.mark.parametrize("files", [PLAIN, GRACE])
def test_machines_that_are_well_have_no_warning(tmp_path: Path, files: Mapping[str, str]) -> None:
    system = make_machine(tmp_path, files, {"/proc/driver/nvidia/gpus/0009:01:00.0/information": None})
    assert warnings_on(system) == []
    assert [one.text[:11] for one in doctor.numa(system)] == (["nodes: 0, 1"] if files is GRACE else [])


def test_affinity_and_ranks_choose_the_worker_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = make_machine(tmp_path, GRACE)
    assert "72 of 72 usable (0-71)" in next(doctor.processors(system)).text
    one = {"/proc/self/status": "Cpus_allowed_list:\t1\n"}
    assert "too few" in one_warning(tmp_path / "one", PLAIN, one).text
    for name, value in {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "16"}.items():
        monkeypatch.setenv(name, value)
    assert "16 worker threads on 18-33, the share of rank 1 of 4; 16 for" in next(doctor.processors(system)).text
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" in [one.remedy for one in doctor.processors(system)][-1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun has set the 1, which then does not bound them
    (found,) = doctor.processors(system)
    assert "18 worker threads on 18-35" in found.text


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"/proc/self/cgroup": "0::/pod/box\n", "/sys/fs/cgroup/pod/cpu.max": "120000 100000\n"}, 1.2),  # around it
    ],
)
def test_processor_quota(tmp_path: Path, files: Mapping[str, str], quota: float | None) -> None:
    system = make_machine(tmp_path, PLAIN, files)
    assert cpu_quota(system) == quota
    texts = [one.text for one in warnings_on(system)]
    assert len(texts) == (quota is not None) and all(f"time of {quota:g} processors" in text for text in texts)


def test_memory_and_a_containers_limit(tmp_path: Path) -> None:
    plain = make_machine(tmp_path / "plain", PLAIN)
    assert usable_memory(plain) == 60000000 * 1024
    assert next(doctor.memory(plain)).text.startswith("57.2 GiB usable; ")
    limit = {"/sys/fs/cgroup/memory.max": f"{24 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{6 * GIB}\n"}
    system = make_machine(tmp_path / "limit", PLAIN, limit)
    text = next(doctor.memory(system)).text
    assert usable_memory(system) == 18 * GIB and "18.0 GiB usable (the control group's limit is 24.0 GiB)" in text


def test_pages_swap_numa_and_locked_memory(tmp_path: Path) -> None:
    never = {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}
    assert "echo madvise" in one_warning(tmp_path / "pages", PLAIN, never).remedy
    limits = {"/proc/self/limits": "Max locked memory         65536 65536 bytes\n"}
    assert warnings_on(make_machine(tmp_path / "unlocked", PLAIN, limits)) == [], "without a GPU it does not matter"
    locked = [one.remedy for one in doctor.memory(make_machine(tmp_path / "locked", PLAIN, {**limits, **GPU}))]
    assert "memlock=-1" in locked[-1]
    swapped = {"/proc/meminfo": f"MemAvailable: {64 << 20} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {5 << 20} kB\n"}
    assert "3.0 GiB are swapped out" in one_warning(tmp_path / "swapped", PLAIN, swapped).text
    nodes = {f"/sys/devices/system/node/node{node}/cpulist": f"{node}\n" for node in (0, 1)}
    assert "--cpunodebind=0 --membind=0" in one_warning(tmp_path / "nodes", PLAIN, nodes).remedy


# ---- instruction sets and GPUs ----


def test_a_gpu_that_torch_does_not_use(tmp_path: Path) -> None:
    found = one_warning(tmp_path, PLAIN, GPU)
    assert "NVIDIA H100 80GB HBM3" in found.text and "CUDA_VISIBLE_DEVICES" in found.remedy


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_with_a_narrow_link_and_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {f"{PCI}/current_link_width": "16\n", f"{PCI}/max_link_width": "16\n", **GPU}
    assert warnings_on(make_machine(tmp_path / "wide", PLAIN, wide)) == []
    assert "8 of 16" in one_warning(tmp_path / "narrow", PLAIN, {**wide, f"{PCI}/current_link_width": "8\n"}).text

    def fails(arch: str) -> bytes:
        raise KernelsUnavailable(f"no kernels for {arch}: tried libnvrtc.so.13")

    monkeypatch.setattr("superoffload.links.cuda.compile.compile_kernels", fails)
    found = one_warning(tmp_path / "bare", PLAIN, wide)
    assert "sm_90: tried libnvrtc.so.13" in found.text and "superoffload[cuda13]" in found.remedy

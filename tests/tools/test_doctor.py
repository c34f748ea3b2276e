"""`superoffload doctor`: the command, this machine, GPUs, software, and what it calls a problem."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from superoffload import kernels
from superoffload.host.system import System, format_cpu_list, parse_cpu_list
from superoffload.tools.cli import EXIT_USAGE, main
from superoffload.tools.doctor import self_test
from superoffload.tools.doctor.bandwidth import examine_bandwidth, measure, measure_step
from superoffload.tools.doctor.cpu import examine_instruction_sets
from superoffload.tools.doctor.examine import Diagnosis
from superoffload.tools.doctor.findings import OK, PROBLEM, WARNING, Examination
from superoffload.tools.doctor.gpu import Device, examine_gpu
from superoffload.tools.doctor.self_test import examine_undo
from superoffload.tools.doctor.software import examine_software, release
from tests.support.fake_machine import GRACE, PLAIN, Gpus, make_machine, one_warning, warnings_of

GIB = 1 << 30


# ---- this machine, for real ----


def test_this_machine_is_fit_and_every_finding_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(out)]) == 0
    shown, values = capsys.readouterr().out, json.loads(out.read_text())
    assert values["passed"] and values["problems"] == 0
    assert values["machine"]["instruction sets"]["current"] == kernels.current_isa()
    assert values["machine"]["memory bandwidth"]["bytes_per_second"] > 1e9
    assert values["machine"]["software"]["versions"]["torch"]
    assert set(kernels.available_isas()) == set(values["machine"]["self-test"])
    for finding in values["findings"]:
        assert finding["level"] in (OK, WARNING) and finding["text"]
        assert bool(finding["remedy"]) == (finding["level"] != OK)
    for isa in kernels.available_isas():
        assert f"{isa}: a speculated step was undone" in shown
    assert max(map(len, shown.splitlines())) <= 116


def test_this_machine_with_one_processor_and_little_locked_memory(tmp_path: Path) -> None:
    """As in a small container: the limits are real ones, of a process of its own."""
    out = tmp_path / "doctor.json"
    script = (
        "import os, resource, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from superoffload.tools.cli import main\n"
        "sys.exit(main(['doctor', '--json', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(out)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    values = json.loads(out.read_text())
    assert values["machine"]["CPU"]["cpus_usable"] == 1 == values["machine"]["memory bandwidth"]["threads"]
    assert values["machine"]["memory"]["memlock_bytes"] == 65536
    texts = [finding["text"] for finding in values["findings"] if finding["level"] == WARNING]
    assert any("one processor for everything" in text for text in texts)
    assert any("locked memory is limited to 0.0625 MiB" in text for text in texts)


def test_missing_root_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", "/no/such/folder"]) == 2
    assert "root=/no/such/folder: no such folder" in capsys.readouterr().err


def test_bandwidth_is_measured_over_every_way_to_walk() -> None:
    rate, way, walks = measure(1 << 18, [-1], seconds=0.0)
    assert 1e8 < rate < 1e13
    assert walks >= 6 and way.block in (64, 256, 1024)


def test_the_kernel_s_own_step_is_measured_for_the_planner() -> None:
    assert 1e8 < measure_step(1 << 18, [-1], steps=2) < 1e13
    found = examine_bandwidth(System(), [-1], 256 << 20, superchip=False)
    assert found.facts["step_bytes_per_second"] > 1e8 and "the kernel's own step reaches" in found.findings[0].text


def test_self_test_leaves_the_instruction_set_as_it_was() -> None:
    before = kernels.current_isa()
    found = examine_undo()
    assert kernels.current_isa() == before
    assert found.facts == dict.fromkeys(kernels.available_isas(), "exact")


def test_self_test_notices_an_inexact_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undo that leaves one master one unit in the last place off, as inverse arithmetic would."""
    honest = kernels.Span.undo

    def inexact(span: kernels.Span) -> None:
        honest(span)
        span._arrays["master"].view("uint32")[1000] ^= 1

    monkeypatch.setattr(kernels.Span, "undo", inexact)
    found = examine_undo()
    problems = [finding for finding in found.findings if finding.level == PROBLEM]
    assert {finding.text.split(":")[0] for finding in problems} >= set(kernels.available_isas())
    assert "undo did not restore" in problems[0].text and problems[0].remedy
    assert not Diagnosis([found]).passed


def test_self_test_notices_sets_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    if len(kernels.available_isas()) < 2:
        pytest.skip("needs two instruction sets to disagree")
    calls = iter(range(100))
    honest = self_test.try_undo

    def different() -> tuple[self_test.State, list[str]]:
        state, failures = honest()
        return (bytes([next(calls)]), *state[1:]), failures

    monkeypatch.setattr(self_test, "try_undo", different)
    assert any("different bits" in finding.text for finding in examine_undo().findings)


def test_a_problem_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = Examination("memory")
    found.problem("it is broken", "mend it")
    monkeypatch.setattr("superoffload.tools.doctor.examine.diagnose", lambda *_, **__: Diagnosis([found]))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM  it is broken" in shown and "-> mend it" in shown and "not fit to train: 1 problem" in shown


# ---- GPUs and software ----


def test_gpu_over_pcie(tmp_path: Path) -> None:
    link = "/sys/bus/pci/devices/0000:17:00.0/current_link"
    system = make_machine(tmp_path, PLAIN, {f"{link}_speed": "32.0 GT/s PCIe\n", f"{link}_width": "16\n"})
    found = examine_gpu(system, Gpus(Device("Example H100", 80 * GIB, "0000:17:00.0", 55e9, 53e9)))
    assert found.facts["devices"][0]["link"] == "32.0 GT/s x16"
    assert "measured 55.0 GB/s up and 53.0 GB/s down" in found.findings[0].text and warnings_of(found) == []


def test_gpu_without_a_compiler(tmp_path: Path) -> None:
    system = make_machine(tmp_path, PLAIN)
    device = Device("Example", 8 * GIB, None, 25e9, 25e9)
    found = examine_gpu(system, Gpus(device))
    assert "compiled by NVRTC 13.0" in found.findings[-1].text and found.facts["nvrtc"] == "NVRTC 13.0 (made up)"
    text = one_warning(examine_gpu(system, Gpus(device, compiler=("", "libnvrtc.so.13: cannot open"))))
    assert "summed by the processors" in text and "tried: libnvrtc.so.13: cannot open" in text
    assert "superoffload[cuda13]" in text


def test_slow_and_unmeasured_gpu_links(tmp_path: Path) -> None:
    system = make_machine(tmp_path, PLAIN)
    slow = Device("Example", 8 * GIB, None, 1.5e9, 3e9)
    unmeasured = Device("Example", 8 * GIB, None, error="CUDA out of memory")
    texts = warnings_of(examine_gpu(system, Gpus(slow, unmeasured)))
    assert "0: 1.5 GB/s" in texts[0] and "1: the link could not be measured: CUDA out of memory" in texts[1]


def test_gpu_of_a_superchip(tmp_path: Path) -> None:
    system = make_machine(tmp_path, GRACE)
    good = Device("NVIDIA GH200 480GB", 96 * GIB, None, 375e9, 297e9)
    assert "NVLink-C2C" in examine_gpu(system, Gpus(good)).findings[0].text
    wrong_node = Device("NVIDIA GH200 480GB", 96 * GIB, None, 100e9, 120e9)
    assert "numactl" in one_warning(examine_gpu(system, Gpus(wrong_node)))


def test_versions_decide_which_adapters_work() -> None:
    versions = {"torch": "2.13.0+cpu", "deepspeed": "0.18.0", "transformers": "5.1.0", "accelerate": "1.10"}
    found = examine_software(versions.get)
    assert found.facts["adapters"] == dict.fromkeys(("deepspeed", "fsdp2", "ddp", "transformers"), "works")
    others = {**versions, "deepspeed": "0.20.0", "transformers": "4.57.0"}
    states = examine_software(others.get).facts["adapters"]
    assert states["deepspeed"] == "needs deepspeed <= 0.19.8, found 0.20.0", "enable() refuses it"
    assert states["transformers"] == "needs transformers >= 5, found 4.57.0"
    older = examine_software({**versions, "deepspeed": "0.17.6"}.get).facts["adapters"]
    assert older["deepspeed"] == "needs deepspeed >= 0.18.0, found 0.17.6"
    assert "transformers, which is not installed" in str(examine_software({"torch": "2.6"}.get).facts)


@pytest.mark.parametrize("torch, text", [(None, "not installed"), ("2.5.1", "older than 2.6")])
def test_without_a_usable_torch_nothing_trains(torch: str | None, text: str) -> None:
    found = examine_software(lambda name: torch if name == "torch" else None)
    (problem,) = (finding for finding in found.findings if finding.level == PROBLEM)
    assert text in problem.text and "pip install" in problem.remedy


def test_the_command_examines_a_machine_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from superoffload.tools.cli import main\n"
        "sys.exit(main(['doctor', '--no-bandwidth']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "no GPU: torch is not installed" in done.stdout, done.stderr
    assert "every bit as it has to be" in done.stdout


def test_slower_instruction_set_by_choice_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if len(kernels.available_isas()) < 2:
        pytest.skip("needs a second instruction set")
    monkeypatch.setenv(kernels.ISA_VARIABLE, "scalar")
    with kernels.using_isa("scalar"):
        found = examine_instruction_sets()
    assert "scalar is in use although" in one_warning(found) and kernels.ISA_VARIABLE in one_warning(found)


def test_an_instruction_set_that_is_not_here_ends_the_command_in_one_line() -> None:
    """Forced in the environment, where the kernels meet it when they are first imported."""
    environment = {**os.environ, kernels.ISA_VARIABLE: "mmx"}
    command = [sys.executable, "-m", "superoffload", "doctor", "--no-bandwidth"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"superoffload: error: {kernels.ISA_VARIABLE}=mmx: ")
    assert ", ".join(kernels.available_isas()) in line


# ---- small parts ----


def test_processor_lists_both_ways() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert format_cpu_list([11, 10, 8, 3, 2, 1, 0]) == "0-3,8,10-11"
    assert parse_cpu_list("") == [] and format_cpu_list([]) == "" and parse_cpu_list(None) == []


def test_releases_compare_by_their_numbers() -> None:
    assert release("2.13.0+cpu") == (2, 13, 0) and release("0.19.8rc1") == (0, 19, 8)
    assert release("2.6") >= (2, 6) > release("2.5.9")

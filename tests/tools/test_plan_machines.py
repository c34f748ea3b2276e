"""Machines of a plan: built-in profiles with sources, and what doctor measured, which wins over any profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from superoffload.errors import ArgumentError
from superoffload.tools.cli import main
from superoffload.tools.plan.hardware import find_hardware
from superoffload.tools.plan.profiles import GH200_96, PROFILES, resembling


def test_every_bandwidth_has_a_source() -> None:
    for profile in PROFILES.values():
        numbers = {name for name, value in vars(profile).items() if isinstance(value, (int, float))}
        assert numbers - {"gpus_per_node"} == set(profile.sources)
        assert all(len(text) > 10 for text in profile.sources.values())


def doctor_file(path: Path, devices: list[dict[str, object]], **bandwidth: float) -> Path:
    machine = {
        "GPU": {"devices": devices},
        "memory": {"usable_bytes": 64e9},
        "memory bandwidth": {"bytes_per_second": 50e9, **bandwidth},
    }
    path.write_text(json.dumps({"machine": machine}))
    return path


def test_profile_that_doctor_measured(tmp_path: Path) -> None:
    device = {"name": "NVIDIA H200", "memory_bytes": 150e9, "host_to_device": 55e9, "device_to_host": 52e9}
    found = find_hardware(str(doctor_file(tmp_path / "box.json", [device, device])))
    assert (found.gpu_memory, found.link_up, found.link_down, found.gpus_per_node) == (150e9, 55e9, 52e9, 2)
    assert found.host_memory == 32e9 and found.host_bandwidth == 25e9, "two GPUs share the host"
    assert "measured by doctor" in found.sources["link_up"] and "data sheet" in found.sources["flops"]
    bare = doctor_file(tmp_path / "bare.json", [])
    with pytest.raises(ArgumentError, match="pass --gpu"):
        find_hardware(str(bare))
    assert find_hardware(str(bare), "a100-pcie4").host_memory == 64e9


def test_a_file_without_bandwidths_says_what_is_missing_and_how_to_give_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = doctor_file(tmp_path / "quick.json", [])
    values = json.loads(path.read_text())
    del values["machine"]["memory bandwidth"]  # as `superoffload doctor --no-bandwidth` leaves it
    path.write_text(json.dumps(values))
    command = ["plan", "--model", "1B", "--hardware", str(path), "--gpu", "h200-pcie5"]
    assert main(command) == 2
    error = capsys.readouterr().err
    for part in ("--no-bandwidth", "bandwidth is missing", f"superoffload doctor --json {path}", "--host-bandwidth GB"):
        assert part in error
    assert main([*command, "--host-bandwidth", "37.5"]) == 0
    assert "host_bandwidth: 38 GB/s: given (--host-bandwidth)" in capsys.readouterr().out
    assert find_hardware(str(path), "h200-pcie5", 37.5e9).host_bandwidth == 37.5e9
    values["machine"]["memory"]["usable_bytes"] = None
    path.write_text(json.dumps(values))
    with pytest.raises(ArgumentError, match="could not tell how much memory there is"):
        find_hardware(str(path), "h200-pcie5", 37.5e9)


def test_a_bandwidth_that_is_given_counts_for_built_in_machines_too() -> None:
    assert find_hardware("gh200-96", None, 100e9).host_bandwidth == 100e9
    assert find_hardware("gh200-96").host_bandwidth == GH200_96.host_bandwidth
    for wrong in (0.0, -1e9, float("inf"), float("nan")):
        with pytest.raises(ArgumentError, match=r"host_bandwidth=.*expected GB/s, a number above 0"):
            find_hardware("gh200-96", None, wrong)


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"machine": 3}'])
def test_files_that_doctor_did_not_write_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ArgumentError, match="superoffload doctor --json"):
        find_hardware(str(tmp_path / "x.json"))


RTX_4090 = {
    "name": "NVIDIA GeForce RTX 4090",
    "memory_bytes": 25_383_075_840,
    "host_to_device": 25e9,
    "device_to_host": 26e9,
}


def test_a_measured_machine_is_planned_as_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = doctor_file(tmp_path / "desk.json", [RTX_4090], step_bytes_per_second=42e9)
    found, profile = find_hardware(str(path)), PROFILES["rtx-4090"]
    assert (found.gpu_memory, found.link_up, found.link_down) == (25_383_075_840, 25e9, 26e9)
    assert (found.host_memory, found.host_bandwidth) == (64e9, 42e9), "of the step, not of a walk that computes nothing"
    assert (found.flops, found.gpu_bandwidth) == (profile.flops, profile.gpu_bandwidth)
    assert found.collectives == 25e9 / 2, "over the link that was measured"
    assert set(found.measured) == {"gpu_memory", "host_memory", "host_bandwidth", "link_up", "link_down"}
    main(["plan", "--model", "1B", "--hardware", str(path)])
    measured, rest = capsys.readouterr().out.split("Hardware, measured on this machine")[1].split("not measured\n")
    for name in found.measured:
        assert f"- {name}: " in measured and f"- {name}: " not in rest
    assert "- flops: 165 TFLOP/s" in rest


def test_a_profile_that_is_asked_for_replaces_nothing_that_was_measured(tmp_path: Path) -> None:
    path = doctor_file(tmp_path / "desk.json", [RTX_4090])
    found = find_hardware(str(path), "h100-pcie5")
    assert (found.gpu_memory, found.link_up, found.flops) == (25_383_075_840, 25e9, PROFILES["h100-pcie5"].flops)
    unmeasured = doctor_file(tmp_path / "busy.json", [{**RTX_4090, "host_to_device": None, "device_to_host": None}])
    found = find_hardware(str(unmeasured))
    assert found.link_up == PROFILES["rtx-4090"].link_up and "link_up" not in found.measured
    given = find_hardware(str(path), host_bandwidth=31e9)
    assert given.host_bandwidth == 31e9 and "host_bandwidth" not in given.measured


def test_a_gpu_without_a_profile_is_named_and_keeps_its_memory(tmp_path: Path) -> None:
    path = doctor_file(tmp_path / "old.json", [{**RTX_4090, "name": "NVIDIA GeForce GTX 1080"}])
    with pytest.raises(ArgumentError, match=r"no profile of NVIDIA GeForce GTX 1080; pass --gpu .* stay as doctor"):
        find_hardware(str(path))
    assert find_hardware(str(path), "rtx-3090").gpu_memory == 25_383_075_840


def test_a_machine_without_a_gpu_is_told_what_a_plan_is_for(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"doctor saw no GPU.*--gpu.*superoffload.CPUAdamW") as caught:
        find_hardware(str(doctor_file(tmp_path / "laptop.json", [])))
    assert "(here: 64 GB)" in str(caught.value)


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA GeForce RTX 4080 SUPER", "rtx-4080"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA RTX A6000", "rtx-a6000"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"), ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40-pcie4"), ("NVIDIA A100-SXM4-80GB", "a100-pcie4"),
        ("NVIDIA A100 80GB PCIe", "a100-card"), ("NVIDIA A100-PCIE-40GB", "a100-40-card"),
        ("NVIDIA H100 80GB HBM3", "h100-pcie5"), ("NVIDIA H100 PCIe", "h100-card"), ("NVIDIA H200", "h200-pcie5"),
        ("NVIDIA B200", "b200-pcie5"), ("NVIDIA GB200", "gb200"), ("NVIDIA GH200 480GB", "gh200-96"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_devices_are_recognized_by_their_names(device: str, name: str | None) -> None:
    found = resembling(device)
    assert (found.name if found else None) == name


def test_a_profile_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", "1B", "--hardware", "rtx-4090"])
    shown = capsys.readouterr().out
    assert "on 1 x rtx-4090, a profile, not measured" in shown and "Hardware, not measured" in shown
    assert "measured on this machine" not in shown
    assert main(["plan", "--model", "1B", "--hardware", "rtx-4090", "--gpu", "l4"]) == 2
    assert "gpu=l4: hardware=rtx-4090 has its own GPU" in capsys.readouterr().err

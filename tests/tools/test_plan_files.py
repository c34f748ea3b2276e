"""Files that `superoffload plan` reads: whatever they are, a clear refusal in bounded time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from superoffload.errors import ArgumentError
from superoffload.tools.cli import main
from superoffload.tools.plan.hardware import find_hardware
from superoffload.tools.plan.models import read_config
from tests.support.forged_checkpoints import STRANGE

MACHINE: dict[str, Any] = {
    "GPU": {"devices": []},
    "memory": {"usable_bytes": 1 << 36},
    "memory bandwidth": {"bytes_per_second": 1e10},
}
CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", STRANGE)
def test_strange_files_are_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x\x1b.json"
    STRANGE[kind](path)
    for option in (["--hardware", str(path), "--model", "1B"], ["--model", str(path)]):
        assert main(["plan", *option]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path}/x\\x1b.json" in said and said.count("\n") == 1


@pytest.mark.parametrize("path", ["a\0.json", "x" * 5000, "x" * 5000 + ".json"])
def test_paths_that_cannot_be(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--hardware", path, "--model", "1B"], ["--model", path]):
        assert main(["plan", *option]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"GPU": {"devices": [{"name": 3}]}},
        {"GPU": {"devices": [3]}},
        {"GPU": {"devices": 3}},
        {"memory": {"usable_bytes": "much"}},
        {"memory": {"usable_bytes": 10**400}},
        {"memory": []},
        {"memory bandwidth": {"bytes_per_second": []}},
    ],
    ids=str,
)
def test_machines_with_wrong_fields(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"machine": {**MACHINE, **changed}}))
    with pytest.raises(ArgumentError):
        find_hardware(str(path), "h100-pcie5" if "GPU" not in changed else None)


@pytest.mark.parametrize("value", [math.inf, 10**400, 1e300, 1e-300, True, math.nan])
@pytest.mark.parametrize("where", ["memory_bytes", "host_to_device", "usable_bytes", "bytes_per_second"])
def test_numbers_that_cannot_be(where: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": "NVIDIA H100 PCIe", "memory_bytes": 1 << 36, "host_to_device": 1e10, "device_to_host": 1e10}
    machine = json.loads(json.dumps({**MACHINE, "GPU": {"devices": [device]}}))
    next(part for part in (*machine["GPU"]["devices"], *machine.values()) if where in part)[where] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"machine": machine}))
    assert main(["plan", "--hardware", str(path), "--model", "1B"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", [*CONFIG, "intermediate_size", "head_dim", "num_local_experts"])
def test_sizes_that_cannot_be(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, name: 10**400}))
    assert main(["plan", "--hardware", "h100-pcie5", "--model", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 500


@pytest.mark.parametrize(
    "changed",
    [
        {"text_config": 3},
        {"num_local_experts": "x"},
        {"intermediate_size": {"a": 1}},
        {"head_dim": "x"},
        {"head_dim": -1},
        {"num_key_value_heads": "x"},
        {"hidden_size": True},
    ],
    ids=str,
)
def test_configs_with_wrong_fields(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(ArgumentError):
        read_config(path)


def test_a_name_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x\x1b[2J.json"
    path.write_text(json.dumps({"machine": MACHINE}))
    main(["plan", "--hardware", str(path), "--gpu", "h100-pcie5", "--model", "1B"])
    said = capsys.readouterr().out
    assert "\x1b" not in said and "x\\x1b[2J" in said


@pytest.mark.parametrize("name", ["NVIDIA GH200 120GB\x1b[2J\u202e", "Unknown\x1b[2J\n" + "x" * 5000])
def test_a_device_does_not_steer_the_terminal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = {"name": name, "memory_bytes": 1 << 36, "host_to_device": 1e11, "device_to_host": 1e11}
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"machine": {**MACHINE, "GPU": {"devices": [device]}}}))
    main(["plan", "--hardware", str(path), "--model", "1B"])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "\u202e" not in out and "\\x1b[2J" in out + err and len(err) < 1000

"""`python -m benchmarks.tensors`: its rows, its table, its aims and its plot; what it leaves as it was."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.all_report import headline
from benchmarks.tensors.report import aims_table, plot, table
from benchmarks.tensors.steps import (
    AUTOGRAD,
    CONTESTANTS,
    FUSED,
    KERNELS,
    ON_DEMAND,
    OURS,
    PHASES,
    TensorsBenchmark,
    rows_of,
    run_tensors,
)
from superoffload import kernels
from superoffload.errors import SuperOffloadError
from superoffload.host.processors import allowed_cpus
from superoffload.tools.cli import EXIT_OK, EXIT_USAGE
from tests.support.benchmarks import bench as start


def made_up(count: int, ours: float, fused: float, per_module: float) -> list[dict[str, Any]]:
    """Rows of one number of tensors, in seconds per tensor."""
    costs = {AUTOGRAD: 0.0, FUSED: fused, OURS: ours, KERNELS: 2 * fused, ON_DEMAND: ours}
    return [
        {
            "name": name,
            "tensors": count,
            "phases": dict.fromkeys(PHASES, 1e-3),
            "seconds_per_tensor": cost,
            "processor_seconds_per_tensor": cost / 2,
            "seconds_per_tensor_of": dict.fromkeys(PHASES, cost / 2),
            "seconds_per_module": per_module if name == ON_DEMAND else None,
            "processor_seconds_per_module": per_module / 2 if name == ON_DEMAND else None,
            "ratio_to": FUSED,
            "ratio": None if name == AUTOGRAD else cost / fused,
            "processor_ratio": None if name == AUTOGRAD else 2 * cost / fused,
        }
        for name, cost in costs.items()
    ]


def test_every_contestant_has_a_row_for_each_number_of_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--counts", "30", "10", "--numel", "8", "--quick", "--quiet"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert start("tensors", *options, *files) == EXIT_OK
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["machine"]["kernel_isa"] and report["versions"]["torch"] and report["commit"]
    assert report["command"][:3] == ["python", "-m", "benchmarks.tensors"] and report["limit"] is None
    assert report["settings"]["cpus"] == allowed_cpus()[:1], "one processor by default"
    rows = report["rows"]
    assert [(row["tensors"], row["name"]) for row in rows] == [(n, name) for n in (10, 30) for name in CONTESTANTS]
    printed = capsys.readouterr().out
    for row in rows:
        assert row["numel"] == 8 * row["tensors"] and row["threads"] == 1 and row["samples"] == 2
        assert set(row["phases"]) == set(row["seconds_per_tensor_of"]) == set(PHASES)
        assert 0 < row["seconds_min"] <= row["seconds_median"]
        assert sum(row["phases"].values()) == pytest.approx(row["seconds_median"]), "of two samples"
        assert row["seconds_per_tensor_min"] <= row["seconds_per_tensor"]
        assert (row["seconds_per_module"] is not None) == (row["name"] == ON_DEMAND)
        assert row["isa"] == ("" if row["name"] in (AUTOGRAD, FUSED) else kernels.current_isa())
        assert f"{row['tensors']:>7,} {row['name']}" in printed
    autograd = [row for row in rows if row["name"] == AUTOGRAD]
    assert all(row["seconds_per_tensor"] == 0 and row["ratio"] is None for row in autograd)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "us per tensor" in headline({"status": "done", "key": "tensors", "result": report})


def test_the_buckets_of_the_steps_that_are_timed_are_speculated() -> None:
    rows = run_tensors(TensorsBenchmark([12], 8, allowed_cpus()[:1], rounds=3, steps=2), lambda text: None)
    fates = {row["name"]: row["fates"] for row in rows}
    assert fates[AUTOGRAD] == fates[FUSED] == fates[KERNELS] == {}
    for name in (OURS, ON_DEMAND):
        assert fates[name]["buckets_speculated"] == 3 * (2 + 1), "one bucket, and one step more per turn"
        assert fates[name]["buckets_committed"] + fates[name]["buckets_undone"] == 9


@pytest.fixture
def two_threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads_of_torch")
def test_processors_threads_and_the_garbage_collector_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, bind = os.sched_getaffinity(0), os.sched_setaffinity
    bound: list[set[int]] = []
    seen: list[tuple[set[int], int, bool]] = []

    def recorded(thread: int, cpus: Iterable[int]) -> None:
        bound.append(set(cpus))
        bind(thread, bound[-1])

    monkeypatch.setattr(os, "sched_setaffinity", recorded)
    gc.enable()

    def tell(text: str) -> None:
        seen.append((os.sched_getaffinity(0), torch.get_num_threads(), gc.isenabled()))

    run_tensors(TensorsBenchmark([3], 4, [min(allowed)], rounds=1, steps=1), tell)
    assert all(each == ({min(allowed)}, 1, False) for each in seen) and seen
    assert bound == [{min(allowed)}, allowed]
    assert (os.sched_getaffinity(0), torch.get_num_threads(), gc.isenabled()) == (allowed, 2, True)


@dataclass
class Measured:
    """Seconds that were not measured."""

    name: str
    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]

    def fates(self) -> dict[str, float]:
        return {}


def test_differences_are_taken_within_a_round() -> None:
    """Every round takes a second longer than the one before, for all; ours has one round that takes 50 longer."""
    costs = {
        AUTOGRAD: (1, 1, 0, 0), FUSED: (1, 1, 4, 2), OURS: (1, 5, 6, 2), KERNELS: (1, 1, 6, 0), ON_DEMAND: (9, 5, 6, 4),
    }  # fmt: skip
    found = {}
    for name, of_phases in costs.items():
        phases = dict(zip(PHASES, of_phases, strict=True))
        seconds = {phase: [cost, cost + 1.0, cost + 2.0] for phase, cost in phases.items()}
        found[name] = Measured(name, seconds, {phase: [cost / 2] * 3 for phase, cost in phases.items()})
    found[OURS].seconds["backward"][1] += 50
    rows = {row["name"]: row for row in rows_of(found, TensorsBenchmark([2], 8, [0, 1], rounds=3, steps=1), 2)}
    assert [row["seconds_per_tensor"] for row in rows.values()] == [0, 2, 5, 3, 5]
    assert [row["processor_seconds_per_tensor"] for row in rows.values()] == [0, 1, 2.5, 1.5, 2.5]
    assert [row["ratio"] for row in rows.values()] == [None, 1, 2.5, 1.5, 2.5]
    assert [row["processor_ratio"] for row in rows.values()] == [None, 1, 2.5, 1.5, 2.5]
    assert rows[ON_DEMAND]["processor_seconds_per_module"] == 2.5 and rows[OURS]["processor_seconds_per_module"] is None
    assert rows[OURS]["seconds_per_tensor_of"] == {"forward": 0, "backward": 2, "step": 3, "zero_grad": 1}
    assert [row["seconds_per_module"] for row in rows.values()] == [None, None, None, None, 5]
    assert rows[ON_DEMAND]["seconds_median"] == 24 + 4 and rows[ON_DEMAND]["seconds_min"] == 24
    assert all((row["threads"], row["numel"], row["samples"]) == (2, 16, 3) for row in rows.values())


def test_steps_that_were_skipped_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", lambda numel, **_: torch.full((numel,), float("nan")))
    with pytest.raises(SuperOffloadError, match=r"AdamW did more than speculate and commit \(skipped_steps"):
        run_tensors(TensorsBenchmark([3], 4, allowed_cpus()[:1], rounds=1, steps=1), lambda text: None)


def test_aims_are_those_for_2000_tensors() -> None:
    few = made_up(250, ours=30e-6, fused=10e-6, per_module=11e-6)
    aimed = made_up(2000, ours=19e-6, fused=9e-6, per_module=10.5e-6)
    many = made_up(20000, ours=38e-6, fused=9e-6, per_module=10.5e-6)
    cost, used, ratio, ratio_used, module, module_used, growth = aims_table([*few, *aimed, *many]).splitlines()
    assert cost.startswith("met    AdamW, us per tensor beyond autograd (<= 20): 30.0 for 250, 19.0 for 2,000, 38.0")
    assert ratio.startswith("met    ") and ratio.endswith("(<= 2.5): 3.0 for 250, 2.1 for 2,000, 4.2 for 20,000")
    assert module.startswith("MISSED ") and "10.5 for 2,000" in module
    assert used.endswith("in processor time: 15.0 for 250, 9.5 for 2,000, 19.0 for 20,000")
    assert "4.2 for 2,000" in ratio_used and "5.2 for 2,000" in module_used
    assert growth == (
        "cost per tensor with 20,000 tensors over that with 2,000: AdamW x 2.00, CPUAdamW x 1.00, torch fused x 1.00"
    )
    assert len(aims_table(aimed).splitlines()) == 6, "one number of tensors shows no growth"
    cost, *_, growth = aims_table([*few, *made_up(1000, 21e-6, 9e-6, 1e-6)]).splitlines()
    assert cost.startswith("MISSED ") and "with 1,000 tensors over that with 250: AdamW x 0.70" in growth


def test_a_ratio_that_noise_has_hidden_is_left_out(tmp_path: Path) -> None:
    rows = made_up(50, ours=30e-6, fused=-1e-6, per_module=-2e-6)
    for row in rows:
        row["ratio"] = None
    shown = table(rows).splitlines()[-1]
    assert shown.split()[-1] == "-2.0" and "unknown" in aims_table(rows).splitlines()[2]
    more = made_up(2000, ours=30e-6, fused=9e-6, per_module=1e-6)
    assert aims_table([*rows, *made_up(50000, 30e-6, 9e-6, 1e-6)]).endswith("CPUAdamW unknown, torch fused unknown")
    plot({"rows": [*rows, *more]}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--processors", "0"], "processors=0: expected a number from 1 to "),
        (["--processors", "100000"], "processors=100000: expected a number from 1 to "),
        (["--counts", "10", "0"], "counts=0: expected positive numbers"),
        (["--numel", "0"], "numel=0: expected at least 1"),
        (["--rounds", "0"], "rounds=0: expected at least 1"),
        (["--counts", "10", "--numel", str(1 << 40)], f"counts=10, numel={1 << 40}: the contestants take"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("tensors", *arguments) == EXIT_USAGE
    assert said in capsys.readouterr().err

"""`python -m benchmarks.zero3`: its rows, and that both contestants train alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zero3.__main__ import make_parser, run
from benchmarks.zero3.report import holds, line, rows_of
from benchmarks.zero3.steps import (
    EAGER,
    LATER,
    STOCK,
    UPSTREAM,
    Workload,
    check_ranks,
    default_ranks,
    measure_rank,
)
from superoffload.errors import ArgumentError
from tests.support.deepspeed import upstream
from tests.support.deepspeed.ranks import QUICK_KERNELS, Ranks


def bench(*arguments: str) -> int:
    args = make_parser().parse_args(list(arguments))
    args.command_line = "test"
    return run(args)


@pytest.mark.timeout(600)  # in a new clone DeepSpeed compiles its Adam first, beside other tests
@pytest.mark.usefixtures("kernel")
@pytest.mark.in_turn
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", QUICK_KERNELS, prepend=os.pathsep)
    json_path, plot_path = tmp_path / "rows.json", tmp_path / "rows.png"
    small = ("--width", "32", "--layers", "2", "--tokens", "16", "--rounds", "2", "--steps", "2")
    outputs = ("--json", str(json_path), "--plot", str(plot_path))
    assert bench("--ranks", "2", "--clip", "0.5", *outputs, *small) == 0
    result = json.loads(json_path.read_text())
    assert [row["name"] for row in result["rows"]] == [STOCK, EAGER, LATER]
    for row in result["rows"]:
        assert row["seconds_median"] >= row["optimizer_seconds_median"] > 0
        assert row["ranks"] == 2
        assert row["clip"] == 0.5
        assert row["numel"] == 2 * (8 * 32 * 32 + 32 * 7)
    stock, *ours = result["rows"]
    assert stock["ratio"] == 1.0
    assert all(row["loss"] == pytest.approx(stock["loss"], rel=1e-2) for row in ours)
    assert result["versions"]["deepspeed"]
    assert plot_path.stat().st_size > 10_000


def test_ratios_are_of_turns_side_by_side() -> None:
    """A machine that becomes ten times slower half-way changes no ratio."""
    stock = {"steps": [[2.0, 2.0], [20.0, 20.0]], "parts": [[1.0, 1.0], [10.0, 10.0]]}
    ours = {"steps": [[1.5, 1.5], [15.0, 15.0]], "parts": [[0.5, 0.5], [5.0, 5.0]]}
    facts = {"gpu_bytes": None, "isa": None, "threads": 1, "numel": 4, "host_bytes": 8, "loss": 1.0, "clip_rate": None}
    workload = Workload(32, 1, 4, 2, 2, 0.0, "bf16", None, (STOCK, EAGER))
    rows = rows_of(workload, 1, [{STOCK: {**stock, **facts}, EAGER: {**ours, **facts}}])
    assert [row["ratio"] for row in rows] == [1.0, 0.75]
    assert [row["optimizer_ratio"] for row in rows] == [1.0, 0.5]
    assert "x 0.75" in line(rows[1])


def beside_upstream() -> dict[str, Any]:
    """As on a GPU: with DeepSpeed's own SuperOffload, whose need for one is stubbed."""
    workload = Workload(32, 2, 16, 1, 1, 0.0, "bf16", 1, (STOCK, EAGER, UPSTREAM))
    with upstream.stubs():
        return {"workload": workload, "found": measure_rank(workload, 0, 1)}


@pytest.mark.usefixtures("kernel")
def test_upstream_is_measured_where_it_can_run() -> None:
    alone = Ranks(1)  # its engine would be in the way of later tests
    try:
        (result,) = alone.run(beside_upstream)
    finally:
        alone.close()
    rows = rows_of(result["workload"], 1, [result["found"]])
    assert [row["name"] for row in rows] == [STOCK, EAGER, UPSTREAM]
    assert rows[1]["threads"] == 1 and rows[2]["threads"] is None, "upstream's row is not of our engine"
    assert rows[2]["ratio"] > 0
    assert rows[2]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-2)


def test_every_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ranks(64)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_ranks(2)
    with pytest.raises(ArgumentError, match="--ranks 3: GPUs here: 2"):
        check_ranks(3)
    assert default_ranks() == [1, 2]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert default_ranks() == [1], "the default fits every machine"
    check_ranks(1)


def test_gpu_memory_is_that_of_all_ranks() -> None:
    found = {"steps": [[1.0]], "parts": [[1.0]], "isa": None, "threads": 1, "numel": 4, "host_bytes": 8, "loss": 1.0}
    workload = Workload(32, 1, 4, 1, 1, 0.0, "bf16", None, (STOCK,))
    (row,) = rows_of(workload, 2, [{STOCK: {**found, "clip_rate": None, "gpu_bytes": 3 << 20}}] * 2)
    assert row["gpu_bytes"] == 6 << 20
    assert "GPU      6 MiB" in line(row)


def test_what_it_checks() -> None:
    stock = {"name": STOCK, "ratio": 1.0, "optimizer_ratio": 1.0}
    good = {"name": EAGER, "ratio": 0.99, "optimizer_ratio": 0.7}
    assert holds([stock, good])
    assert holds([stock, good, {**stock, "name": UPSTREAM, "ratio": 2.0}])  # we promise nothing for it
    assert not holds([stock, {**good, "ratio": 1.01}])
    assert not holds([stock, {**good, "optimizer_ratio": 0.72}])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--ranks", "0"), "--ranks '0'"), (("--clip", "off,x"), "--clip 'x'"), (("--rounds", "0"), "--rounds 0")],
)
def test_bad_arguments(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bench(*arguments)

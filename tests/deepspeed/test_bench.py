"""`superoffload bench deepspeed`: its rows, and that both contestants train alike."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from superoffload.benchmarking.deepspeed import EAGER, LATER, STOCK, Workload
from superoffload.benchmarking.deepspeed_report import holds, line, rows_of
from superoffload.cli.bench_deepspeed import add_parser, run
from superoffload.errors import ArgumentError
from tests.deepspeed.test_stock_kernel import kernel  # noqa: F401  (stock steps with DeepSpeed's kernel)


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    args = add_parser(parser.add_subparsers()).parse_args(list(arguments))
    args.command_line = "test"
    return run(args)


@pytest.mark.usefixtures("kernel")
def test_rows(tmp_path: Path) -> None:
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
    facts = {"isa": None, "threads": 1, "numel": 4, "host_bytes": 8, "loss": 1.0, "clip_rate": None}
    workload = Workload(32, 1, 4, 2, 2, 0.0, "bf16", None, (STOCK, EAGER))
    rows = rows_of(workload, 1, [{STOCK: {**stock, **facts}, EAGER: {**ours, **facts}}])
    assert [row["ratio"] for row in rows] == [1.0, 0.75]
    assert [row["optimizer_ratio"] for row in rows] == [1.0, 0.5]
    assert "x 0.75" in line(rows[1])


def test_what_it_checks() -> None:
    stock = {"name": STOCK, "ratio": 1.0, "optimizer_ratio": 1.0}
    good = {"name": EAGER, "ratio": 0.99, "optimizer_ratio": 0.7}
    assert holds([stock, good])
    assert not holds([stock, {**good, "ratio": 1.01}])
    assert not holds([stock, {**good, "optimizer_ratio": 0.72}])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--ranks", "0"), "--ranks '0'"), (("--clip", "off,x"), "--clip 'x'"), (("--rounds", "0"), "--rounds 0")],
)
def test_bad_arguments(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bench(*arguments)

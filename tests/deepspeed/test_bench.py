"""`superoffload bench deepspeed`: its rows, and that both contestants train alike."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from superoffload.benchmarking import deepspeed as bench
from superoffload.errors import ArgumentError
from tests.deepspeed.test_stock_kernel import kernel  # noqa: F401  (stock steps with DeepSpeed's kernel)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.usefixtures("kernel")
def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    small = ("--width", "32", "--layers", "2", "--tokens", "16", "--rounds", "2", "--steps", "2")
    assert bench.run(parse("--ranks", "2", "--clip", "off,0.5", "--json", str(path), *small)) == 0
    result = json.loads(path.read_text())
    assert [row["name"] for row in result["rows"]] == [bench.STOCK, bench.EAGER, bench.LATER] * 2
    for row in result["rows"]:
        assert row["seconds_median"] >= row["optimizer_seconds_median"] > 0
        assert row["ranks"] == 2
        assert row["numel"] == 2 * (8 * 32 * 32 + 32 * 7)
    for stock, *ours in (result["rows"][:3], result["rows"][3:]):
        assert stock["ratio"] == 1.0
        assert all(row["loss"] == pytest.approx(stock["loss"], rel=1e-2) for row in ours)
    assert result["versions"]["deepspeed"]


def test_what_it_checks() -> None:
    stock = {"name": bench.STOCK, "ratio": 1.0, "optimizer_ratio": 1.0}
    good = {"name": bench.EAGER, "ratio": 0.99, "optimizer_ratio": 0.7}
    assert bench.holds([stock, good])
    assert not bench.holds([stock, {**good, "ratio": 1.01}])
    assert not bench.holds([stock, {**good, "optimizer_ratio": 0.72}])


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="--ranks '0'"):
        bench.run(parse("--ranks", "0"))

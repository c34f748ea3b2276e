"""``python -m benchmarks.noticing`` measures every reading of the parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import noticing
from benchmarks.training.config import ModelConfig
from benchmarks.training.model import DTYPES

SMALL = ModelConfig(layers=1, hidden=32, heads=2, kv_heads=1, mlp=64, sequence=32, vocabulary=64)


def test_it_times_each_reading_and_writes_a_row_per_dtype_and_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called: set[str] = set()

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return function(*arguments, **options)

        return call

    for module, name in noticing.PARTS:
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))  # monkeypatch also puts it back
    monkeypatch.setattr(noticing, "MODEL", SMALL)
    path = tmp_path / "noticing.json"
    monkeypatch.setattr("sys.argv", ["noticing", "--tokens", "16", "--steps", "1", "--json", str(path)])
    assert noticing.main() == 0
    assert called == {name for _, name in noticing.PARTS}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == [f"{dtype}, 16 tokens" for dtype in DTYPES]
    assert all(0 < row["share"] < 1 for row in rows)

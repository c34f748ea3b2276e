"""`python -m benchmarks.hybrid_device` runs, on little, and leaves Megatron and torch's streams as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.hybrid_device import ALONE, FUSED, OURS, PLAIN, WHOLE, main
from superoffload.integrations import megatron as adapter
from tests.support.optional_packages import needs

pytestmark = needs("megatron")


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, threads, streams = tmp_path / "out.json", torch.get_num_threads(), torch.cuda.Stream
    try:
        given = ["--count", "3", "--numel", "500", "--threads", "1", "--seconds", "0.1", "--out", str(out)]
        assert main(given) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    timed = ((True, WHOLE), (True, ALONE), (False, WHOLE))
    wanted = [(on, what, name) for on, what in timed for name in (OURS, FUSED, PLAIN)]
    assert [(row["overlap"], row["what"], row["name"]) for row in rows] == wanted
    assert [row["optimizers"] for row in rows] == [3] * 6 + [1] * 3
    assert all(row["seconds_median"] > 0 and row["numel"] == 1500 for row in rows)
    assert "torch fused" in capsys.readouterr().out
    assert not adapter.is_enabled() and torch.cuda.Stream is streams

"""`python -m benchmarks.in_place` runs, on little, and its contestants do the same job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.in_place import COPIED, IN_PLACE, TORCH, Model, OverMasters, main
from superoffload import AdamW


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["--count", "3", "--numel", "70000", "--seconds", "0.1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == [IN_PLACE, COPIED, TORCH]
    assert all(row["seconds_median"] > 0 and row["name"] in capsys.readouterr().out for row in rows[:1])


def test_contestants_do_the_same_job() -> None:
    found = []
    for ours in (True, False):
        model = Model(3, 5000)
        with AdamW(model.params, speculation="never", max_grad_norm=1.0) as optimizer:
            step = optimizer.step if ours else OverMasters(model.params).step
            for _ in range(5):
                model.backward()
                step()
        found.append(torch.cat([param.detach().float() for param in model.params]))
    assert (found[0] != Model(3, 5000).params[0][0].float()).any()
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=1e-5)

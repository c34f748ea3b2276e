"""The study of formats of 8-bit moments: its codes are those of the package, and what it measures is not empty."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from benchmarks import moment_formats
from superoffload.engine import moments


def test_our_codes_are_those_of_the_package() -> None:
    for form, sign in ((moments.EXP_AVG, 128), (moments.EXP_AVG_SQ, 256)):
        stored = torch.cat([torch.arange(sign), torch.zeros(256 - sign), torch.tensor([127])]).to(torch.uint8)
        found = moments.read_moment(stored, 256, form).double().numpy()[:sign]
        np.testing.assert_array_equal(found, moment_formats.floats(form.exponent_bits, form.fraction_bits))


def test_dynamic_tree_codes_are_those_of_the_paper() -> None:
    """Seven bits without a sign: 0, 1, and 64, 32, ... 1 fractions between powers of ten."""
    codes = moment_formats.dynamic_tree(7)
    assert len(codes) == 2 + 127
    assert codes[0] == 0 and codes[-1] == 1
    assert sum(codes[:-1] > 0.1) == 64 and sum((codes > 0.01) & (codes < 0.1)) == 32


def test_it_measures(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert moment_formats.main(["--steps", "30", "--blocks", "4", "--decades", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["name"] for row in rows] == list(moment_formats.formats())
    for row in rows:
        assert 0.9 < row["correlation"] < 1 and 0.9 < row["size"] < 1.1

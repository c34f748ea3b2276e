"""The error of one step against double precision, in units in the last place, beside torch's fused kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.adam.accuracy import PARTS, STEPS, accuracy_table, errors, our_step, torch_step, training_like_inputs


def test_errors_are_no_larger_than_those_of_torchs_fused_kernel() -> None:
    """Over twelve step numbers and three learning rates, mean and largest, of masters and both moments. The one
    exception is the very largest error of a master, which is luck: there it is the median of 36 draws."""
    rows = accuracy_table(1 << 18)
    for ours, torchs in zip(rows[:3], rows[3:], strict=True):
        assert ours["array"] == torchs["array"] and ours["name"] == "superoffload"
        assert ours["mean_ulp"] < torchs["mean_ulp"], ours
        assert ours["median_largest_ulp"] <= torchs["median_largest_ulp"], ours
        if ours["array"] != "master":
            assert ours["largest_ulp"] <= torchs["largest_ulp"], ours


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.99), (0.5, 0.9)])
def test_nor_are_they_with_other_betas(betas: tuple[float, float]) -> None:
    """What rounding a beta to fp32 cuts off differs from one to the next: below it, above it, nothing for 0.5."""
    found = []
    for seed, step in enumerate(STEPS):
        drawn = training_like_inputs(1 << 16, seed, step)
        inputs = replace(drawn, hyper=replace(drawn.hyper, beta1=betas[0], beta2=betas[1]))
        found.append((errors(inputs, our_step(inputs)), errors(inputs, torch_step(inputs))))
    for part in PARTS:
        ours, torchs = ([draw[whose][part] for draw in found] for whose in (0, 1))
        assert np.mean(ours) < np.mean(torchs), part
        if part != "master":
            assert np.max(ours) <= np.max(torchs), part

"""The same gradients through stock ZeRO-3 CPU offload (torch.optim.AdamW) and through ours."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import SCENARIOS, WAYS, compare

STEPS = 8
# Each step moves a weight by at most about 3 lr = 0.01 and both compute that in fp32 with at most some ten roundings of
# 2**-24 relative; they add up over the steps.
TOLERANCE = STEPS * 10 * 2.0**-24


SETTLED = not version("deepspeed").startswith("0.18.") if find_spec("deepspeed") else True

# All ways of training are compared in these; in the others stock and ours with match_stock, which is enough to see
# whether a feature of DeepSpeed meets the schedule.
EVERY_WAY = ("clip sometimes", "fp16, dynamic scale", "two backwards", "parameters offloaded, not finite")
SOME_WAYS = ("stock", "super_offload", "match, waiting")


def _check_rank(found: dict[str, Any], *, growing: bool) -> None:
    stock = found["stock"]["record"]
    for way in {"match", "match, waiting", "super_offload"} & set(found):
        ours = found[way]["record"]
        assert ours["applied"] == stock["applied"], way
        assert ours["scales"] == stock["scales"], way
        assert ours["lrs"] == stock["lrs"], way
        assert ours["norms"] == stock["norms"], way  # to the bit
        assert found[way]["away"] < TOLERANCE, way
        assert found[way]["digests"] == found["match, waiting"]["digests"], way
    if "ours" not in found:
        return
    for way in ("ours", "ours, waiting", "ours, later"):
        ours = found[way]["record"]
        assert ours["applied"] == stock["applied"], way
        assert ours["lrs"] == stock["lrs"], way
        if not growing:  # DeepSpeed halves the norm where the loss scale grows
            assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6), way
        assert found[way]["digests"] == found["ours"]["digests"], way


@pytest.mark.parametrize("name", SCENARIOS)
def test_stock_and_ours_agree(name: str, two_ranks: Ranks) -> None:
    if not SETTLED and (SCENARIOS[name].poison or name == "unmanaged accumulation"):
        pytest.skip(
            "needs DeepSpeed 0.19: older ones step with NaN in bf16, report other norms, only manage accumulation"
        )
    steps = STEPS + 2 if name == "clip sometimes" else STEPS
    results = two_ranks.run(compare, name, steps, tuple(WAYS) if name in EVERY_WAY else SOME_WAYS)
    skipped = steps - sum(results[0]["stock"]["record"]["applied"])
    assert skipped == (2 if SCENARIOS[name].poison else 0)
    scales = results[0]["stock"]["record"]["scales"]
    if "dynamic" in name:
        moves = {after / before for before, after in pairwise(scales)}
        assert moves == {0.5, 1.0, 2.0}, "the loss scale must grow and shrink"
    for found in results:
        _check_rank(found, growing="dynamic" in name)
        stats = found["super_offload"]["stats"]
        assert stats["skipped_steps"] == skipped
        assert found["match, waiting"]["stats"]["buckets_speculated"] == 0
        if name != "clip always":  # there, the first bucket proves the clip
            assert stats["buckets_speculated"] > 0, "nothing was speculated, so nothing was tested"
        if name == "accumulation":  # only the last micro-batch's gradients are speculated with
            assert stats["buckets_undone"] == stats["journal_overflows"]
        if name == "parameters offloaded, not finite":
            assert stats["buckets_undone"] > 0
        if name == "clip sometimes":
            stats = found["match"]["stats"]
            assert stats["buckets_committed"] and stats["buckets_replayed"]

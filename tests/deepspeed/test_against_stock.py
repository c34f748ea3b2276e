"""The same gradients through stock ZeRO-3 CPU offload (torch.optim.AdamW) and through ours."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deepspeed.ranks import Ranks
from tests.deepspeed.scenarios import SCENARIOS, WAYS, compare

STEPS = 10
# Each step moves a weight by at most about 3 lr = 0.01 and both compute that in fp32 with at most some ten roundings of
# 2**-24 relative; they add up over the steps.
TOLERANCE = STEPS * 10 * 2.0**-24


def _check_rank(name: str, found: dict[str, Any]) -> None:
    stock = found["stock"]["record"]
    for way in {"match", "match, waiting", "super_offload"} & set(found):
        ours = found[way]["record"]
        assert ours["applied"] == stock["applied"], way
        assert ours["scales"] == stock["scales"], way
        assert ours["norms"] == stock["norms"], way  # to the bit
        assert found[way]["away"] < TOLERANCE, way
    for way in ("ours", "ours, waiting", "ours, later"):
        ours = found[way]["record"]
        assert ours["applied"] == stock["applied"], way
        assert ours["norms"] == pytest.approx(stock["norms"], rel=1e-6) or "dynamic" in name, way
    assert found["match"]["digests"] == found["match, waiting"]["digests"]
    assert found.get("super_offload", found["match"])["digests"] == found["match"]["digests"]
    assert found["ours"]["digests"] == found["ours, waiting"]["digests"] == found["ours, later"]["digests"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_stock_and_ours_agree(name: str, two_ranks: Ranks) -> None:
    some = ("clip sometimes", "two backwards", "parameters offloaded")
    ways = [way for way in WAYS if way != "super_offload" or name in some]
    results = two_ranks.run(compare, name, STEPS, ways)
    for found in results:
        _check_rank(name, found)
    ours = [found["ours"]["stats"] for found in results]
    if name != "clip always":  # there, the first bucket proves the clip
        assert all(stats["buckets_speculated"] > 0 for stats in ours), "nothing was speculated, so nothing was tested"
    assert all(found["ours, waiting"]["stats"]["buckets_speculated"] == 0 for found in results)
    if name == "clip sometimes":
        assert all(stats["buckets_committed"] and stats["buckets_replayed"] for stats in ours)
    skipped = STEPS - sum(results[0]["stock"]["record"]["applied"])
    assert skipped == (2 if SCENARIOS[name].poison else 0)
    assert all(stats["skipped_steps"] == skipped for stats in ours)

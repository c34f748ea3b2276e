"""The GPU suite's targets, computed from rows; the table that is printed; what counts as a failure."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.gpu_suite import targets
from benchmarks.gpu_suite.contestants import (
    ALL_ON_DEVICE,
    BARE,
    OURS,
    OURS_CLIPPED,
    OURS_SYNCHRONOUS,
)
from benchmarks.gpu_suite.table import short_table, table
from benchmarks.jobs import plain

PEER = "DeepSpeed ZeRO-Offload"
GPU_PEER = "DeepSpeed SuperOffload"
OURS_HALF, OURS_EAGER = "ours, 50 % clipped", "ours, eager"


def machine_row(key: str, **result: Any) -> dict[str, Any]:
    return {"key": key, "status": "done", "settings": {"what": key}, "result": result}


def result_row(contestant: str, seconds: float | None, *, tokens: int = 8192, **more: Any) -> dict[str, Any]:
    """A billion parameters on a GPU that does not exist; seconds None: it ran out of memory."""
    times = {"seconds_median": seconds, "tokens_per_second": 1.0, "final_loss": 1.0, "host_peak_resident_bytes": 1}
    result = {
        "parameters": 10**9,
        "bare_seconds": 0.08,
        "device": "imagined",
        "losses": [5.0],
        "digests": {"master": "a"},
        **times,
        **more,
    }
    return {
        "key": f"{tokens} tokens, {contestant}",
        "status": "done",
        "settings": {"what": "train", "contestant": contestant, "tokens": tokens, "capped_gib": None},
        "result": result if seconds is not None else {"out_of_memory": "too little"},
    }


MACHINE = [
    machine_row("link", down_gb_per_s=50.0, up_gb_per_s=40.0, both_gb_per_s=20.0, device="imagined"),
    machine_row("adam", step_seconds_per_param=0.2e-9, threads=16),
]


def judge(*training: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    found = [*MACHINE, *training]
    judged = targets.all_targets(found)
    text = table(found, judged)
    assert all(target.name in text for target in judged)
    return {target.name.partition(": ")[2]: (target.verdict, target.value) for target in judged}


def test_targets_are_computed_from_the_rows() -> None:
    """The bound is the largest of 0.1 s on the device, 0.2 s for a CPU pass and 0.05 s for the slower transfer."""
    memory = {"gpu_used_bytes": 100}
    verdicts = judge(
        result_row(BARE, 0.08),
        result_row(ALL_ON_DEVICE, 0.1),
        result_row(OURS, 0.22, gpu_used_bytes=104),
        result_row(OURS_CLIPPED, 0.24),
        result_row(OURS_SYNCHRONOUS, 0.3),
        result_row(PEER, 0.58, **memory),
        result_row(GPU_PEER, 0.48, gpu_used_bytes=200),
    )
    assert verdicts["ours, iteration over the bound"] == ("met", pytest.approx(1.1))
    assert verdicts["ours, every step clipped, iteration over the bound"] == ("missed", pytest.approx(1.2))
    assert verdicts["ours, exposed time over the best peer's"] == ("missed", pytest.approx(0.14 / 0.4))
    assert verdicts["ours, GPU memory over the leanest peer's"] == ("met", pytest.approx(1.04))
    assert verdicts["ours and ours, synchronous, parts of the state that differ"] == ("met", 0.0)


def test_what_was_not_measured_is_said_to_be_so() -> None:
    verdicts = judge(
        result_row(OURS, 0.22),
        result_row(ALL_ON_DEVICE, None),
        result_row(OURS_SYNCHRONOUS, 0.3, digests={"master": "b"}),
    )
    assert verdicts["ours, iteration over the bound"] == ("not measured", None)
    assert verdicts["ours, exposed time over the best peer's"] == ("not measured", None)
    assert verdicts["ours, GPU memory over the leanest peer's"] == ("not measured", None)
    assert verdicts["ours and ours, synchronous, parts of the state that differ"] == ("missed", 1.0)


def test_times_of_a_cpu_meet_no_target() -> None:
    verdicts = judge(result_row(ALL_ON_DEVICE, 0.1), result_row(OURS, 0.1, device="cpu"))
    assert verdicts["ours, iteration over the bound"] == ("not measured", pytest.approx(0.5))


def test_the_table_of_a_slot_is_below_four_kilobytes() -> None:
    """With every row there, long reasons and long targets; nothing is cut off then."""
    trained = [
        result_row(name, 0.3, tokens=tokens, gpu_used_bytes=1 << 34, timed={"clipped_steps": 20, "steps": 20, **_FATES})
        for tokens in (8192, 32768)
        for name in (BARE, ALL_ON_DEVICE, OURS, OURS_CLIPPED, GPU_PEER)
    ]
    trained[4] = {**trained[4], "status": "failed", "error": 500 * "why ", "result": None}
    judged = targets.all_targets([*MACHINE, *trained])
    text = short_table([*MACHINE, *trained], judged)
    assert len(text.encode()) < 4000 and "the rest" not in text and "why why" in text
    assert all(name in text for name in (BARE, OURS_CLIPPED, "400 replayed", "link: down 50.0"))
    many = [result_row(OURS, 0.3, tokens=tokens) for tokens in range(1000)]
    cut = short_table(many, [])
    assert 3000 < len(cut.encode()) < 4096 and cut.endswith("--report gpu_suite.json")


_FATES = {f"buckets_{name}": 400 for name in ("committed", "replayed", "stepped", "two_phase")}


def test_a_loss_that_is_not_a_number_is_shown_as_such() -> None:
    row = plain(result_row(OURS, 0.3, final_loss=math.nan))
    slow = plain(result_row(OURS_CLIPPED, math.nan))
    assert row["result"]["final_loss"] == "NaN"
    assert "nan" in short_table([row, slow], targets.all_targets([row, slow]))


@pytest.mark.parametrize("status", ["failed", "timed out"])
def test_a_race_that_did_not_end_is_no_race_that_was_won(status: str) -> None:
    row = {"key": "races, always, eager", "status": status, "settings": {"what": "races"}, "error": "exit status -11"}
    (target,) = targets.all_targets([row])
    assert target.verdict == "missed" and "exit status -11" in target.why
    assert targets.is_wrong(row) and "exit status -11" in short_table([row], [target])
    differing = {**row, "status": "done", "result": {"different_seeds": [3], "seeds": [1, 3]}}
    assert targets.is_wrong(differing) and not targets.is_wrong({**differing, "result": {"different_seeds": []}})


def test_only_a_peers_failure_is_forgiven() -> None:
    for name, wrong in ((OURS, True), (BARE, True), (GPU_PEER, False)):
        failed = {**result_row(name, 0.1), "status": "failed", "error": "exit status 1"}
        assert targets.is_wrong(failed) is wrong
        assert targets.is_wrong(result_row(name, None)) is (name == OURS), "elsewhere out of memory is a result"
        assert targets.is_wrong(plain(result_row(name, 0.1, final_loss=math.nan))) is (name == OURS)

"""The scaling model against sums done by hand, and the page that quotes it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from superoffload.plan.step_time import JOURNALED_BYTES, REPLAY_BYTES
from superoffload.scaling import (
    Machine,
    Model,
    fewest_ranks_where_the_verdict_shows,
    main,
    ring,
    simulate,
    table,
    tail_of,
    verdict_seconds,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
# Round numbers: 1e9 parameters, 1 s of forward, 2 s of backward, 10 buckets.
MACHINE = Machine(
    memory=100e9, link_down=20e9, link_up=40e9, compute=2e12, per_node=4, intra_node=100e9, network=10e9,
    gpu_latency=1e-5, host_latency=1e-4, host_bandwidth=1e9,
)  # fmt: skip
MODEL = Model(parameters=1e9, tokens=1000, layers=10, buckets=10)


def test_one_rank_by_hand() -> None:
    row = simulate(MACHINE, MODEL, 1)
    assert row.compute == pytest.approx(3.0) and row.collectives == row.verdict == 0.0
    assert row.optimizer == pytest.approx(JOURNALED_BYTES / 100)
    # The last of ten buckets: 0.2 GB down, its pass, then all parameters up.
    tail = 0.2 / 20 + JOURNALED_BYTES / 1000
    assert row.exposed == pytest.approx(tail + 2 / 40)
    assert row.step == pytest.approx(3.0 + row.exposed)
    assert row.clipped_step == pytest.approx(3.0 + tail + REPLAY_BYTES / 100 + 2 / 40 / 10)


def test_a_ring_by_hand() -> None:
    assert ring(MACHINE, 1, 1e9) == 0.0
    assert ring(MACHINE, 4, 1e9) == pytest.approx(3 * 1e-5 + 1e9 * 3 / 4 / 100e9)
    assert ring(MACHINE, 8, 1e9) == pytest.approx(7 * 1e-5 + 1e9 * 7 / 8 / 40e9), "four ports of 10 GB/s"


def test_the_verdict_is_the_longer_the_more_ranks_there_are() -> None:
    assert verdict_seconds(MACHINE, 1) == 0.0
    assert verdict_seconds(MACHINE, 5) == pytest.approx(4 * (1e-4 + 128e-9))


def test_buckets_queue_where_memory_is_slower_than_backward() -> None:
    slow = replace(MACHINE, memory=5e9)  # 5.84 s of passes behind 2 s of backward
    tail = tail_of(slow, MODEL, 1e9, backward=2.0)
    assert tail.arrived == pytest.approx(0.01)
    stepped = 0.2 + 0.01 + JOURNALED_BYTES / 5 - 2.0
    assert tail.stepped == pytest.approx(stepped), "all of them, after the first has arrived"


def test_an_exchange_shows_once_it_outlasts_the_last_bucket() -> None:
    count = fewest_ranks_where_the_verdict_shows(MACHINE, MODEL)
    assert count > 1
    before, after = simulate(MACHINE, MODEL, count // 2), simulate(MACHINE, MODEL, count)
    assert before.verdict_exposed == 0.0 < after.verdict_exposed < after.verdict
    shard = MODEL.parameters / count
    last_bucket = JOURNALED_BYTES * shard / MODEL.buckets / MACHINE.memory
    assert after.verdict_exposed == pytest.approx(after.verdict - last_bucket)
    never = replace(MACHINE, host_latency=0.0, host_bandwidth=1e30)
    assert fewest_ranks_where_the_verdict_shows(never, MODEL) == 0


def test_the_page_has_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text()
    assert table(Machine(), Model()) in page
    big = Model(parameters=70e9, layers=80, buckets=64)
    assert table(Machine(), big, (4, 8, 16, 64, 256, 1024)) in page
    shows = [fewest_ranks_where_the_verdict_shows(Machine(), model) for model in (Model(), big)]
    assert [int(number) for number in re.findall(r"shows from (\d+) ranks on", page)] == shows
    monkeypatch.setattr("sys.argv", ["scaling", "--parameters", "70e9", "--layers", "80", "--buckets", "64"])
    main()
    assert f"below {shows[1]} ranks" in capsys.readouterr().out

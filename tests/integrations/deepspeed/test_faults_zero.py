"""A rank that dies, a worker that fails: clear errors in bounded time, never a hang."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest

from tests.support.deepspeed.ranks import RankError, Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario
from tests.support.deepspeed.training import OURS, end
from tests.support.two_hosts import ADDRESSES, HOSTS, Link, missing_for_namespaces

SCENARIO = Scenario({"clip": CLIP_SOME})


def die(report: str) -> None:
    """The other rank writes down the error that it gets."""
    os.environ["SUPEROFFLOAD_RANK_TIMEOUT"] = "20"
    engine = SCENARIO.engine(*WAYS["ours, later"])
    SCENARIO.train(engine, range(3))
    engine.backward(SCENARIO.loss_of(engine, 3, 0))
    if engine.global_rank == 1:
        os._exit(1)
    try:
        engine.step()
    except Exception as error:
        Path(report).write_text(f"{type(error).__name__}: {error}")
        raise


def test_a_dying_rank(tmp_path: Path) -> None:
    group = Ranks(2)
    report = tmp_path / "error"
    try:
        with pytest.raises((RankError, EOFError, ConnectionResetError)):
            group.run(die, str(report), timeout=100)
        assert group.processes[0].is_alive(), "the surviving rank must get an error, not die"
    finally:
        group.close()
    assert re.search(r"RankError: the verdict of step 4.*rank 1 .*restarted", report.read_text(), re.DOTALL)


OURS_TO_WAIT, OF_DEEPSPEED = 5.0, 8.0  # seconds


def cut_link(hosts: tuple[str, ...], point: str, cuts: int) -> str:
    """The error that the fourth step ends with on this rank."""
    from superoffload.distributed.session import RankSession
    from tests.support.two_hosts import cut

    engine = SCENARIO.engine(OURS, {"speculation": "always", "rank_timeout": OURS_TO_WAIT})
    SCENARIO.train(engine, range(3))
    start = RankSession.start

    def come_to(there: str) -> None:
        if there == point and engine.global_rank == cuts:
            cut(hosts, "silent", cuts)

    def starting(session: RankSession, sums: dict[int, float]) -> None:
        come_to("exchange")
        start(session, sums)

    try:
        come_to("forward")
        engine.backward(SCENARIO.loss_of(engine, 3, 0))
        with mock.patch.object(RankSession, "start", starting):
            engine.step()
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
    return ""


@pytest.mark.skipif(missing_for_namespaces() is not None, reason=str(missing_for_namespaces()))
@pytest.mark.parametrize(("point", "cuts"), [("exchange", 1), ("forward", 0)])
def test_a_link_that_is_cut(point: str, cuts: int) -> None:
    """In our exchange our time-out ends the wait, in DeepSpeed's all-gather theirs does."""
    with Link() as link:
        group = Ranks(2, link.names, OF_DEEPSPEED)
        try:
            said = group.run(cut_link, link.names, point, cuts, timeout=100)
        finally:
            group.close()
    for rank, error in enumerate(said):
        if point == "forward":
            assert error and "superoffload" not in error
            continue
        assert error.startswith("superoffload.errors.RankError: the verdict of step 4")
        assert f"rank {1 - rank} on {HOSTS[1 - rank]} did not take part within 5 s" in error
    if point == "exchange":
        assert f"the roll call of rank 0 on {ADDRESSES[0]} could not be reached" in said[1]


def failing_worker(stage: int) -> tuple[str, bool, bool]:
    """A worker of rank 1 fails on what it speculates in step 3; then training goes on."""
    from superoffload.errors import SuperOffloadError

    options = {"speculation": "always", "delivery": "on_demand"}
    scenario = Scenario({"zero": {"stage": stage}})
    engine = scenario.engine(OURS, options)
    SCENARIO.train(engine, range(3))
    before = engine.optimizer.state_digests()
    if engine.global_rank == 1:
        engine.optimizer.parts.driver.engine.pool.inject_fault(1, "planted")
    said = ""
    engine.backward(SCENARIO.loss_of(engine, 3, 0))
    try:
        engine.step()
    except SuperOffloadError as error:
        said = f"{type(error).__name__}: {error}"
    unchanged = engine.optimizer.state_digests() == before
    SCENARIO.train(engine, range(3, 6))
    after = engine.optimizer.state_digests()
    end(engine)

    engine = scenario.engine(OURS, options)
    SCENARIO.train(engine, range(6))
    same = engine.optimizer.state_digests() == after
    end(engine)
    return said, unchanged, same


@pytest.mark.parametrize("stage", [2, 3])
def test_a_failed_worker_stops_the_step_on_all_ranks(stage: int, two_ranks: Ranks) -> None:
    (told, *_), (failed, *_) = found = two_ranks.run(failing_worker, stage)
    assert told.startswith("RankError") and "rank 1 raised before the verdict" in told
    assert failed.startswith("WorkerError") and "planted; no rank stepped" in failed
    for _, unchanged, same in found:
        assert unchanged
        assert same, "the step that failed can be taken again"

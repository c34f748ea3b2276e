"""500 random programs, that they meet everything they are there for, and that they find mistakes put in on purpose."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.campaign import Failure, Result, attempt, programs_until_found, run_many, shortened
from tests.fuzz.machine import OPERATIONS
from tests.fuzz.mutants import MUTANTS
from tests.fuzz.program import Program, draw

PROGRAMS, PARTS = 500, 5
# What all of them meet at least: a third of what they do meet. A fuzzer that no longer comes by somewhere is red.
LEAST = {
    "backward": 1200,
    "backward, KeyboardInterrupt": 24,
    "backward, twice": 80,
    "backward, UserError": 40,
    "backward while saving": 30,
    "backward_again, outdated graph": 2,
    "buckets_abandoned": 100,
    "buckets_committed": 600,
    "buckets_skipped": 4,
    "buckets_stepped": 1000,
    "buckets_two_phase": 340,
    "buckets_undone": 600,
    "edit": 56,
    "edit_state, multiply": 8,
    "edit_state, step": 8,
    "forward while settling": 2,
    "interrupted_backward, KeyboardInterrupt": 24,
    "interrupted_backward, Terminated": 10,
    "interrupted_step, happened": 24,
    "journal_overflows": 300,
    "load, refused": 4,
    "mode, detect_anomaly": 4,
    "mode, function mode": 4,
    "regroup, move": 8,
    "regroup, take out": 8,
    "save, background": 40,
    "save while settling": 14,
    "skipped_steps": 48,
    "sleep, slept": 400,
    "step while saving": 16,
    "second signal": 15,
    "step, closure": 40,
    "step, GradScaler": 180,
    "step, unscale_": 4,
    "tie, refused": 80,
    "write while settling": 10,
}


@cache
def results_of(part: int) -> Result:
    size = PROGRAMS // PARTS
    return run_many(range(part * size, (part + 1) * size), most_failures=1)


ALL = pytest.mark.in_turn("fuzz")


@pytest.mark.parametrize("part", [pytest.param(part, marks=ALL if part else ()) for part in range(PARTS)])
def test_random_programs(part: int) -> None:
    for failure in results_of(part).failures:
        pytest.fail(f"seed {failure.program.seed}: {failure.why}\n{failure.program.to_json()}")


@ALL
def test_random_programs_meet_everything() -> None:
    counts = sum((results_of(part).counts for part in range(PARTS)), Counter[str]())
    rare = {name: f"{counts[name]}, expected {least}" for name, least in LEAST.items() if counts[name] < least}
    assert not rare, "what programs no longer meet often enough"


def test_every_operation_is_drawn() -> None:
    assert {op["do"] for seed in range(300) for op in draw(seed).ops} == OPERATIONS.keys()


FOUND_SOON = [
    "arrival: a late gradient undoes nothing",
    "arrival: a second backward is taken for the same gradient",
    "devices: the number of steps is made on the caller's default device",
    "groups: what a program moves or takes out stays",
    "journal: overflow is ignored",
    "state: what a program takes out stays",
    "two phases: nothing is settled",
    "memory: parameters that share it are stepped",
    "writes: masters do not follow written parameters",
]


@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_mistake_is_found(name: str) -> None:
    assert programs_until_found(MUTANTS[name], 30) is not None


def test_a_program_that_fails_is_cut_down_and_can_be_run_again() -> None:
    with MUTANTS["undo: nothing is undone"]():
        failure = next(found for seed in range(20) if isinstance(found := attempt(draw(seed)), Failure))
        short = shortened(failure)
        assert len(short.program.ops) <= 4
        assert Program.from_json(short.program.to_json()) == short.program
        assert isinstance(attempt(short.program), Failure)
    assert not isinstance(attempt(short.program), Failure), "without the mistake it passes"


def test_a_program_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "program.json"
    assert main(["--show", "3"]) == 0
    path.write_text(capsys.readouterr().out)
    assert Program.from_json(path.read_text()) == draw(3)
    assert main(["--replay", str(path)]) == 0
    assert capsys.readouterr().out == "passed\n"

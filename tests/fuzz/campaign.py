"""Many programs: each in a folder of its own, failures cut down to short programs, what happened counted."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.fuzz.machine import run_both
from tests.fuzz.minimize import minimize
from tests.fuzz.mutants import Mutant
from tests.fuzz.program import Program, draw

_HANGS = 120.0  # seconds; a program takes a tenth of one
_TRIES = 3  # where threads decide, a program may fail only sometimes


@dataclass
class Failure:
    program: Program
    why: str
    traceback: str

    @property
    def kind(self) -> str:
        """What makes two failures alike: no numbers, values or digests."""
        return re.sub(r"\[?\d.*", "", ": ".join(self.why.split(": ")[:2]))


@dataclass
class Result:
    programs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.programs += other.programs
        self.counts += other.counts
        self.failures += other.failures


def attempt(program: Program) -> Counter[str] | Failure:
    """What was counted, or why the program failed."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="superoffload-fuzz-", ignore_cleanup_errors=True) as folder,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # advice to users; other tests look at it
        try:
            return run_both(program, Path(folder)).counts
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            return Failure(program, why, traceback.format_exc())


def shortened(failure: Failure) -> Failure:
    """The shortest program found that fails alike."""
    last = [failure]

    def fails(program: Program) -> bool:
        for _ in range(_TRIES):
            found = attempt(program)
            if isinstance(found, Failure) and found.kind == failure.kind:
                last[0] = found
                return True
        return False

    minimize(failure.program, fails)
    return last[0]


@dataclass(frozen=True)
class Task:
    """What one process does at a time: the programs of these seeds, until so many have failed."""

    seeds: range
    failures: int


def run_task(task: Task) -> Result:
    """Where a program hangs, the stacks of all threads are shown."""
    result = Result()
    for seed in task.seeds:
        faulthandler.dump_traceback_later(_HANGS)
        result.programs += 1
        found = attempt(draw(seed))
        if isinstance(found, Failure):
            result.failures.append(shortened(found))
            if len(result.failures) >= task.failures:
                break
        else:
            result.counts += found
    faulthandler.cancel_dump_traceback_later()
    return result


def programs_until_found(mutant: Mutant, most: int) -> tuple[int, str] | None:
    """How many programs it takes until one fails, and why; None: ``most`` did not find it."""
    for seed in range(most):
        with mutant():
            found = attempt(draw(seed))
        if isinstance(found, Failure):
            return seed + 1, found.why
    return None

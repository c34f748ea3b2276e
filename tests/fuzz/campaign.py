"""Many programs: each in a folder of its own, failures cut down to short programs, what happened counted."""

from __future__ import annotations

import faulthandler
import re
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.fuzz.machine import run_both
from tests.fuzz.mutants import Mutant
from tests.fuzz.program import Program, Settings, draw

_HANGS = 120.0  # seconds; a program takes a tenth of one
_TRIES = 3  # where threads decide, a program may fail only sometimes
_PLAIN = Settings(sizes=((64,),), dtypes=("fp32",), groups=(0,))
# Operations make no sense without these, and settings of layers are cut together.
_KEPT = ("do", "seed", "layer", "how", "slot", "signal", "lines", "value", "name", "group", "at", "frozen", "lr")
_KEPT_SETTINGS = ("sizes", "dtypes", "groups", "schedule", "schedule_seed", "bucket_numel", "mode")


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
    folders = tempfile.TemporaryDirectory(prefix="superoffload-fuzz-", ignore_cleanup_errors=True)
    with folders as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice to users; other tests look at it
        try:
            return run_both(program, Path(folder)).counts
        except Exception as error:
            return Failure(program, f"{type(error).__name__}: {error}", traceback.format_exc())


def shortened(failure: Failure, most: int = 400) -> Failure:
    """The shortest program found, in so many programs at most, that fails alike."""
    last = failure

    def fails(program: Program) -> bool:
        nonlocal last, most
        most -= 1
        for _ in range(_TRIES if most >= 0 else 0):
            found = attempt(program)
            if isinstance(found, Failure) and found.kind == failure.kind:
                last = found
                return True
        return False

    before = None
    while before != last.program:
        before, size = last.program, len(last.program.ops)
        while size > 1:  # without half of the operations, a quarter, ..., one
            size, start = size // 2, 0
            while start < len(ops := last.program.ops):
                if not fails(last.program.with_ops(ops[:start] + ops[start + size :])):
                    start += size
        while any(fails(plainer) for plainer in _plainer(last.program)):
            pass
    return last


def _plainer(program: Program) -> Iterator[Program]:
    """Without one detail of an operation, one setting, or the last layer."""
    for i, op in enumerate(program.ops):
        needs = {"save": "memory", "zero_grad": "set_to_none"}.get(op["do"])
        for key in op.keys() - {*_KEPT, needs}:
            plainer = {name: value for name, value in op.items() if name != key}
            yield program.with_ops((*program.ops[:i], plainer, *program.ops[i + 1 :]))
    settings = program.settings
    for name, plain in vars(_PLAIN).items():
        if name not in _KEPT_SETTINGS and getattr(settings, name) != plain:
            yield replace(program, settings=replace(settings, **{name: plain}))
    if len(settings.sizes) > 1:
        sizes, dtypes, groups = settings.sizes[:-1], settings.dtypes[:-1], settings.groups[:-1]
        yield replace(program, settings=replace(settings, sizes=sizes, dtypes=dtypes, groups=groups))


def run_many(seeds: range, most_failures: int) -> Result:
    """The programs of these seeds, until so many have failed. Where one hangs, the stacks of all threads are shown."""
    result = Result()
    for seed in seeds:
        faulthandler.dump_traceback_later(_HANGS)
        result.programs += 1
        found = attempt(draw(seed))
        if isinstance(found, Failure):
            result.failures.append(shortened(found))
            if len(result.failures) >= most_failures:
                break
        else:
            result.counts += found
    faulthandler.cancel_dump_traceback_later()
    return result


def programs_until_found(mutant: Mutant, most: int) -> int | None:
    """How many programs it takes until one fails; None: ``most`` did not find it."""
    for seed in range(most):
        with mutant():
            if isinstance(attempt(draw(seed)), Failure):
                return seed + 1
    return None

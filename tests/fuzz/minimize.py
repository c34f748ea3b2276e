"""From a program that fails to a short one that fails alike: operations are left out, what is left becomes plainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Op, Program, Settings

Fails = Callable[[Program], bool]
_PLAIN = Settings(sizes=((64,),), dtypes=("fp32",), groups=(0,))
_DRAWN_WITH_LAYERS = ("sizes", "dtypes", "groups", "schedule", "schedule_seed", "bucket_numel", "mode")
_KEPT = ("do", "seed", "layer", "how", "slot", "signal", "lines", "value", "name", "group", "at", "frozen", "lr")


def minimize(program: Program, fails: Fails, most: int = 400) -> Program:
    """``fails``: whether a program still fails as the first one did; it is asked at most so often."""
    left = [most]

    def asked(candidate: Program) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(candidate)

    before = None
    while before != program and left[0] > 0:
        before = program
        program = _fewer(program, asked)
        for simpler in (_simpler_ops, _simpler_settings):
            program = _first_that_fails(program, simpler, asked)
    return program


def _fewer(program: Program, fails: Fails) -> Program:
    """Zeller and Hildebrandt's delta debugging, by complements: large parts first, then single operations."""
    size = max(1, len(program.ops) // 2)
    while True:
        start = 0
        while start < len(program.ops):
            candidate = program.with_ops(program.ops[:start] + program.ops[start + size :])
            if fails(candidate):
                program = candidate
            else:
                start += size
        if size == 1:
            return program
        size = max(1, size // 2)


def _first_that_fails(program: Program, simpler: Callable[[Program], Iterator[Program]], fails: Fails) -> Program:
    """Again from the start after every success."""
    found = True
    while found:
        found = False
        for candidate in simpler(program):
            if fails(candidate):
                program, found = candidate, True
                break
    return program


def _simpler_ops(program: Program) -> Iterator[Program]:
    """One operation without one of what is not needed for it to make sense."""
    for i, op in enumerate(program.ops):
        for key in op:
            if key not in _KEPT:
                plainer: Op = {name: value for name, value in op.items() if name != key}
                if op["do"] in ("save", "zero_grad") and key in ("memory", "set_to_none"):
                    continue
                yield program.with_ops((*program.ops[:i], plainer, *program.ops[i + 1 :]))
        if op["do"].startswith("interrupted") and len(op["lines"]) > 1:
            yield program.with_ops((*program.ops[:i], {**op, "lines": op["lines"][:-1]}, *program.ops[i + 1 :]))


def _simpler_settings(program: Program) -> Iterator[Program]:
    settings = program.settings
    if len(settings.sizes) > 1:
        for name in ("sizes", "dtypes", "groups"):
            settings = replace(settings, **{name: getattr(settings, name)[:-1]})
        yield replace(program, settings=settings)
        settings = program.settings
    for name, plain in vars(_PLAIN).items():
        if name not in _DRAWN_WITH_LAYERS and getattr(settings, name) != plain:
            yield replace(program, settings=replace(settings, **{name: plain}))
    for i, dtype in enumerate(settings.dtypes):
        if dtype != "fp32":
            dtypes = (*settings.dtypes[:i], "fp32", *settings.dtypes[i + 1 :])
            yield replace(program, settings=replace(settings, dtypes=dtypes))
    for i, sizes in enumerate(settings.sizes):
        if len(sizes) > 1:
            fewer = (*settings.sizes[:i], sizes[:1], *settings.sizes[i + 1 :])
            yield replace(program, settings=replace(settings, sizes=fewer))

"""A fixed battery of kernel calls and one SHA-256 per operation and types, to compare machines that cannot meet.

    python -m tests.support.kernel_battery                of the kernels on this machine's best instruction set
    python -m tests.support.kernel_battery --isa scalar   on the named one
    python -m tests.support.kernel_battery --reference    of the NumPy reference

All of them print the same. The last one, kept in kernel_battery.json, is what the tests compare with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from superoffload import kernels
from tests.support import kernel_inputs as cases
from tests.support import numpy_kernels
from tests.support.guarded_arrays import GuardedSpan, assert_state
from tests.support.kernel_inputs import State
from tests.support.reference import adam
from tests.support.reference.adam import Hyper, Stepped

RECORDED = Path(__file__).with_name("kernel_battery.json")
PUBLISHED_FORMATS = (*cases.FORMATS, "split")
Arrays = list[npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One span's inputs; the reference's answers come with it, computed when asked for."""

    kind: str
    gradient_format: str
    published_format: str
    l2: bool
    number: int

    @property
    def length(self) -> int:
        return cases.LENGTHS[self.number]

    @property
    def start(self) -> int:
        return cases.STARTS[self.number % len(cases.STARTS)]

    @property
    def hyper(self) -> Hyper:
        return replace(cases.HYPERS[self.number % len(cases.HYPERS)], l2=self.l2)

    @property
    def clipped(self) -> Hyper:
        """What the step is replayed with: the same step, the gradient clipped."""
        return replace(self.hyper, gradient_factor=self.hyper.gradient_factor * 0.61)

    @property
    def old(self) -> State:
        return State(*(values[self._slice] for values in _state(self.kind)))

    @property
    def gradient(self) -> npt.NDArray[Any]:
        return _gradient(self.kind, self.gradient_format)[self._slice]

    @cached_property
    def stepped(self) -> Stepped:
        return adam.step(*self.old, self.gradient, self.published_format, self.hyper)

    @cached_property
    def replayed(self) -> Stepped:
        return adam.step(*self.old, self.gradient, self.published_format, self.clipped)

    @property
    def _slice(self) -> slice:
        begin = (self.number * 37) % (cases.LONGEST - self.length + 1)
        return slice(begin, begin + self.length)


@cache
def _state(kind: str) -> State:
    return cases.state(kind, cases.LONGEST, 100)


@cache
def _gradient(kind: str, form: str) -> npt.NDArray[Any]:
    return cases.gradient(kind, form, cases.LONGEST, 110 + cases.FORMATS.index(form))


@cache
def span_cases(gradient_format: str, published_format: str, l2: bool) -> tuple[Case, ...]:
    """Both kinds of values at every length, the hyper-parameters and starts in turn."""
    return tuple(
        Case(kind, gradient_format, published_format, l2, number)
        for kind in cases.KINDS
        for number in range(len(cases.LENGTHS))
    )


class Reference:
    """The battery's operations by the NumPy reference."""

    def __init__(self) -> None:
        self.step: Any = lambda case: list(case.stepped)
        self.settle = self.step
        self.publish: Any = lambda case: [case.stepped.shadow]
        self.journal: Any = lambda case, width: [*case.stepped, *case.old, *case.replayed]
        self.sum_of_squares: Any = lambda gradient: [adam.sum_of_squares(gradient)]
        self.pack: Any = lambda gradient: [gradient, adam.sum_of_squares(gradient)]
        self.fold_sums: Any = lambda blocks: [np.array([adam.fold_sums(blocks)])]


class Kernel:
    """The same operations by the extension, on the instruction set that is set."""

    def step(self, case: Case) -> Arrays:
        guarded = self._span(case)
        guarded.span.step(case.hyper)
        guarded.check()
        return [*guarded.state, guarded.shadow]

    def publish(self, case: Case) -> Arrays:
        guarded = self._span(case)
        guarded.span.publish(case.hyper)
        guarded.check()
        if not guarded.split:
            assert_state(guarded.state, case.old, "publish changed the state")
        return [guarded.shadow]

    def settle(self, case: Case) -> Arrays:
        guarded = self._span(case)
        guarded.span.publish(case.hyper)
        guarded.span.settle(case.hyper)
        guarded.check()
        return [*guarded.state, guarded.shadow]

    def journal(self, case: Case, width: int) -> Arrays:
        guarded = self._span(case)
        assert guarded.span.step_journaled(case.hyper, width=width)
        result = [values.copy() for values in (*guarded.state, guarded.shadow)]
        guarded.span.undo()
        result += [values.copy() for values in guarded.state]
        assert guarded.span.step_journaled(case.hyper, width=width)
        guarded.span.replay(case.clipped)
        guarded.check()
        return [*result, *guarded.state, guarded.shadow]

    def sum_of_squares(self, gradient: npt.NDArray[Any]) -> Arrays:
        return [numpy_kernels.sum_of_squares(gradient)]

    def pack(self, gradient: npt.NDArray[Any]) -> Arrays:
        out = np.empty_like(gradient)
        return [out, numpy_kernels.sum_of_squares(gradient, out)]

    def fold_sums(self, blocks: npt.NDArray[np.float64]) -> Arrays:
        return [np.array([numpy_kernels.fold_sums(blocks)])]

    def _span(self, case: Case) -> GuardedSpan:
        return GuardedSpan(case.old, case.gradient, case.published_format, case.start)


def digests(backend: Reference | Kernel) -> dict[str, str]:
    """Every operation's digest by name, and under "total" one of all of them."""
    result = {}
    for gradient_format in cases.FORMATS:
        for published_format in PUBLISHED_FORMATS:
            for mode in ("adamw", "l2"):
                spans = span_cases(gradient_format, published_format, mode == "l2")
                types = f"{mode} {gradient_format} to {published_format}"
                result[f"step {types}"] = digest(map(backend.step, spans))
                result[f"publish {types}"] = digest(map(backend.publish, spans))
                if published_format == "split":
                    result[f"settle {types}"] = digest(map(backend.settle, spans))
                for width in (1, 2):
                    result[f"journal of width {width} {types}"] = digest(backend.journal(one, width) for one in spans)
    for form in cases.FORMATS:
        gradients = list(norm_inputs(form))
        result[f"sum_of_squares {form}"] = digest(map(backend.sum_of_squares, gradients))
        result[f"pack {form}"] = digest(map(backend.pack, gradients))
    result["fold_sums"] = digest(map(backend.fold_sums, fold_inputs()))
    result["total"] = hashlib.sha256("".join(result.values()).encode()).hexdigest()
    return result


def norm_inputs(form: str) -> Iterator[npt.NDArray[Any]]:
    """Gradients at every length and start: hostile but finite ones, and some with whatever is not."""
    hostile = cases.gradient("hostile", form, cases.LONGEST + 16, 120)
    finite = cases.finite(hostile, form)
    for number, length in enumerate(cases.LENGTHS):
        start = cases.STARTS[number % len(cases.STARTS)]
        yield finite[start : start + length]
        if number % 8 == 0:
            yield hostile[start : start + length]


def fold_inputs() -> Iterator[npt.NDArray[np.float64]]:
    """Block sums of every length; one in eight has an infinity in it, as a non-finite gradient leaves it."""
    for number, length in enumerate(cases.LENGTHS):
        blocks = cases.block_sums(length, 130 + number)
        if number % 8 == 7:
            blocks[number % length] = np.inf
        yield blocks


def digest(results: Iterable[Arrays]) -> str:
    """Of an operation's cases."""
    found = hashlib.sha256()
    for arrays in results:
        for array in arrays:
            found.update(array.tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.kernel_battery", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--reference", action="store_true", help="compute with the NumPy reference")
    parser.add_argument("--isa", help="the kernels' instruction set (default: the one they choose)")
    options = parser.parse_args()
    if options.isa:
        kernels.set_isa(options.isa)
    result = digests(Reference() if options.reference else Kernel())
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Counts the Python calls and the moves between files that one gradient and one step() make in the package.

    python scripts/walks.py [--json PATH] [--trees]

A call is the start of a function of the package, or the resumption of one of its generators. Comprehensions belong to
the function around them. A move is a call whose nearest caller inside the package is in another file of it; the return
is the same move back and does not count again. So a call from outside (autograd, this script) is no move, and functions
of other packages in between are skipped.

It runs on the CPU with speculation="always", small fp32 parameters and no clip, in the steps after the fifth. Some
calls depend on when a worker thread is done: the figures are medians, with the most moves beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median_high
from types import FrameType
from typing import Any

import torch

import superoffload

FIRST, OTHER, COMPLETES, LAST = (
    "the first gradient of a step",
    "any other gradient",
    "the last gradient of a bucket",
    "the last gradient of backward",
)
STEP, STEP_MORE = "step() with one parameter", "step(), each further parameter"
ZERO_GRAD, ZERO_GRAD_MORE = "zero_grad() with one parameter", "zero_grad(), each further parameter"

_PACKAGE = str(Path(superoffload.__file__).parent) + os.sep
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # have frames of their own before Python 3.12

_NUMEL = 256
_BUCKETS, _PER_BUCKET = 3, 4  # 1024 elements, the smallest bucket possible
_FURTHER = 8  # parameters
_ONE_BUCKET = 1 << 16  # elements, more than the parameters have
_WARM_UP, _COUNTED = 5, 5  # steps
_NEVER_CLIPS = 1e30


@dataclass
class Walk:
    """Counts one way through the package. ``tree``: file and function of each call, with its depth."""

    calls: int = 0
    moves: int = 0
    tree: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def files(self) -> int:
        return len({file for _, file, _ in self.tree})


class Walker:
    """Follows this thread's calls. ``package``: the folder whose files count, with a separator at its end."""

    def __init__(self, package: str = _PACKAGE) -> None:
        self._package = package
        self._inside: list[str] = []  # the files of the package's running functions
        self.walk = Walk()

    def begin(self) -> Walk:
        """Begins another walk."""
        self.walk = Walk()
        return self.walk

    @contextmanager
    def following(self) -> Iterator[Walk]:
        """Counts all calls in the block as one walk."""
        walk = self.begin()
        sys.setprofile(self._follow)
        try:
            yield walk
        finally:
            sys.setprofile(None)
            self._inside.clear()

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._package):
            return
        if code.co_name in _COMPREHENSIONS:
            return
        if event == "return":
            self._inside.pop()
            return
        file = code.co_filename[len(self._package) :]
        self.walk.calls += 1
        self.walk.moves += bool(self._inside) and self._inside[-1] != file
        self.walk.tree.append((len(self._inside), file, getattr(code, "co_qualname", code.co_name)))
        self._inside.append(file)


class _Training:
    """Trains on a sum of scalar products, one per parameter; the gradient of the last one arrives first."""

    def __init__(self, params: int, buckets: int) -> None:
        self._params = [torch.ones(_NUMEL, requires_grad=True) for _ in range(params)]
        self._x = torch.linspace(-1.0, 1.0, _NUMEL)
        self._buckets = buckets
        numel = params * _NUMEL if buckets > 1 else _ONE_BUCKET
        self.optimizer = superoffload.AdamW(
            self._params, speculation="always", max_grad_norm=_NEVER_CLIPS, bucket_numel=numel // buckets, threads=1
        )

    def loss(self, before_gradient: Callable[[int], None] = lambda number: None) -> torch.Tensor:
        """Returns the loss. ``before_gradient`` gets each gradient's number, in order of arrival, in advance."""
        outputs = [torch.dot(param, self._x) for param in self._params]
        for number, output in enumerate(reversed(outputs)):
            output.register_hook(lambda _, number=number: before_gradient(number))
        return torch.stack(outputs).sum()

    def plain_step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Closes the optimizer; raises unless every step was speculated and committed."""
        stats = self.optimizer.stats()
        self.optimizer.close()
        steps = _WARM_UP + _COUNTED
        speculated = self._buckets * steps
        if (stats["steps"], stats["clipped_steps"], stats["buckets_speculated"]) != (steps, 0, speculated):
            raise RuntimeError(f"not {steps} steps of {self._buckets} speculated buckets: {stats}; nothing was counted")


def gradient_walks() -> dict[str, list[Walk]]:
    """Returns the walks of gradients by kind, over all counted steps."""
    count = _BUCKETS * _PER_BUCKET
    training = _Training(count, _BUCKETS)
    walker = Walker()
    found: dict[str, list[Walk]] = {kind: [] for kind in (FIRST, OTHER, COMPLETES, LAST)}
    for _ in range(_WARM_UP):
        training.plain_step()
    for _ in range(_COUNTED):
        loss = training.loss(lambda number: found[_kind(number, count)].append(walker.begin()))
        with walker.following():
            loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.close()
    return found


def _kind(number: int, count: int) -> str:
    if number == 0:
        return FIRST
    if number == count - 1:  # includes what autograd calls at the end of backward
        return LAST
    return COMPLETES if number % _PER_BUCKET == _PER_BUCKET - 1 else OTHER


def step_walks(params: int) -> tuple[list[Walk], list[Walk]]:
    """Returns the walks of step() and of zero_grad() with this many parameters, all in one bucket."""
    training = _Training(params, 1)
    walker = Walker()
    steps, zero_grads = [], []
    for _ in range(_WARM_UP):
        training.plain_step()
    for _ in range(_COUNTED):
        training.loss().backward()
        with walker.following() as walk:
            training.optimizer.step()
        steps.append(walk)
        with walker.following() as walk:
            training.optimizer.zero_grad()
        zero_grads.append(walk)
    training.close()
    return steps, zero_grads


# ---- what is shown ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Holds medians over the walks of one kind; ``most_moves`` is their maximum."""

    name: str
    calls: float
    files: float
    moves: float
    most_moves: float


def _row(name: str, walks: Sequence[Walk]) -> Row:
    calls, files, moves = (median_high(getattr(walk, what) for walk in walks) for what in ("calls", "files", "moves"))
    return Row(name, calls, files, moves, max(walk.moves for walk in walks))


def _more(name: str, one: Row, many: Row) -> Row:
    """Returns what each further parameter adds."""
    names = ("calls", "files", "moves", "most_moves")
    return Row(name, *((getattr(many, what) - getattr(one, what)) / _FURTHER for what in names))


def count_walks() -> tuple[list[Row], dict[str, Walk]]:
    """Returns all rows, and a walk of each kind."""
    gradients = gradient_walks()
    one_step, one_zero_grad = step_walks(1)
    many_steps, many_zero_grads = step_walks(1 + _FURTHER)
    rows = [_row(kind, walks) for kind, walks in gradients.items()]
    step, zero_grad = _row(STEP, one_step), _row(ZERO_GRAD, one_zero_grad)
    rows += [step, _more(STEP_MORE, step, _row("", many_steps))]
    rows += [zero_grad, _more(ZERO_GRAD_MORE, zero_grad, _row("", many_zero_grads))]
    last = {kind: walks[-1] for kind, walks in gradients.items()}
    return rows, {**last, STEP: one_step[-1], ZERO_GRAD: one_zero_grad[-1]}


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':36}{'calls':>8}{'files':>8}{'moves each way':>16}{'at most':>9}"]
    lines += [f"{row.name:36}{row.calls:>8g}{row.files:>8g}{row.moves:>16g}{row.most_moves:>9g}" for row in rows]
    return "\n".join(lines)


def tree(walk: Walk) -> str:
    """Returns the calls, one per line, indented by depth."""
    return "\n".join(f"{'  ' * depth}{function}  ({file})" for depth, file, function in walk.tree)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Calls and moves between files of one gradient and of one step().")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write versions and rows to this file")
    parser.add_argument("--trees", action="store_true", help="show the calls of a walk of each kind too")
    args = parser.parse_args(arguments)
    rows, walks = count_walks()
    print(table(rows))
    if args.trees:
        for name, walk in walks.items():
            print(f"\n{name}:\n{tree(walk)}")
    if args.json is not None:
        versions = {
            "superoffload": superoffload.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        }
        report = {"versions": versions, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``optimizer.state`` as torch shows it: of the last finished step; and what a program changes in it counts.

Reads and writes through an entry wait for the worker threads and undo what was speculated. A tensor that the program
keeps cannot be watched so. Its bucket is not stepped during backward until the program lets go of it
(``Shard.is_held``).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from superoffload.distributed.ownership import like_parameter
from superoffload.engine.bucket import Shard
from superoffload.engine.moments import EXP_AVG, EXP_AVG_SQ, read_exp_avg, read_exp_avg_sq, write_moment
from superoffload.errors import ArgumentError
from superoffload.host.bits import all_finite
from superoffload.host.numbers import as_float
from superoffload.host.signals import Uninterrupted
from superoffload.host.tensors import is_dtensor, local_of, outside_inference
from superoffload.optimizer.state_dict import ParamState, Values, blocks_of, is_whole_number, part_of, read_param
from superoffload.optimizer.tracked_param import TrackedParam

Reveal: TypeAlias = Callable[[], Callable[[Shard], None] | None]  # None: no engine has the state

_NAMES = ("step", "exp_avg", "exp_avg_sq", "master")


class ShownState(MutableMapping[str, Any]):
    """Is the entry of a parameter in ``optimizer.state``.

    What is written to it is copied into the state. In forms that torch does not know (8-bit moments, split masters) a
    read makes a copy, which refuses operations in place. Copies and pickles of an entry are ordinary dictionaries.
    """

    def __init__(self, tracked: TrackedParam, work: Uninterrupted, reveal: Reveal, partial: set[int]) -> None:
        """``partial`` gets the ids of entries from which something is taken out."""
        self.tracked = tracked
        self._work = work
        self._reveal = reveal
        self._partial = partial
        self._removed: set[str] = set()
        self._others: dict[str, Any] = {}  # what the program has put here beside the state
        self._seen: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._kept: dict[str, Any] | None = None  # the values of an entry that is the state's no longer

    @property
    def is_whole(self) -> bool:
        """Returns whether nothing was taken out of it."""
        return not self._removed

    def is_of(self, param: Tensor) -> bool:
        """Returns whether it shows the state of ``param``, whole."""
        return self.tracked.param is param and self._kept is None and self.is_whole

    def follow(self, tracked: TrackedParam, reveal: Reveal) -> None:
        """Shows the same state by a later record of the parameter."""
        self.tracked, self._reveal = tracked, reveal

    def keep(self) -> None:
        """Keeps copies of the values, since the program took this entry out of ``optimizer.state``."""
        self._kept = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.items()}

    # ---- as a mapping -----------------------------------------------------------------------------------------

    def _names(self) -> Iterable[str]:
        return [name for name in _NAMES if name not in self._removed]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept if self._kept is not None else [*self._names(), *self._others])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if self._kept is not None:
            return self._kept[name]
        if name not in self._names():
            return self._others[name]
        return self.tracked.step if name == "step" else self._read(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self._kept is not None:
            self._kept[name] = value
        elif name in _NAMES and self._fits(name, value):
            self._write(name, value)
            self._removed.discard(name)
            self._others.pop(name, None)
        else:  # what is no state of this parameter is refused in step(), if it is still here then
            self._others[name] = value
            if name in _NAMES:
                self._remove(name)

    def __delitem__(self, name: str) -> None:
        if self._kept is not None:
            del self._kept[name]
        elif name in self._others:
            del self._others[name]
        elif name in self._names():
            self._remove(name)
        else:
            raise KeyError(name)

    def _remove(self, name: str) -> None:
        self._removed.add(name)
        self._partial.add(id(self))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)

    # ---- the state --------------------------------------------------------------------------------------------

    def _is_copied(self, name: str) -> bool:
        shard = self.tracked.shard
        return shard.upper is not None if name == "master" else shard.exp_avg.dtype == torch.uint8

    @contextmanager
    def _revealed(self) -> Iterator[Shard]:
        """Brings the state to the end of the last finished step, and keeps backward in other threads from stepping it
        until it was read, or a tensor shows that it may be."""
        shard, reveal = self.tracked.shard, self._reveal()
        if reveal is None or self._work.out_of_use():  # nothing steps it any more
            yield shard
        else:
            with self._work.alone:
                reveal(shard)
                yield shard

    def _read(self, name: str) -> Tensor:
        copied = self._is_copied(name)
        # Tensors that are made in inference mode cannot be changed in place: right for copies alone.
        with self._revealed() as shard, torch.inference_mode(copied):
            return self._shaped(_flat(shard, name)) if copied else self._window(shard, name)

    def _window(self, shard: Shard, name: str) -> Tensor:
        flat, known = _flat(shard, name), self._seen.get(name)
        if known is not None and local_of(known).data_ptr() == flat.data_ptr():
            return known
        shown = self._shaped(shard.window(flat) if flat.is_cpu else flat)
        self._seen[name] = shown
        return shown

    def _shaped(self, flat: Tensor) -> Tensor:
        return like_parameter(self.tracked.param, self.tracked.holding, flat)

    def _fits(self, name: str, value: Any) -> bool:
        if name == "step":
            return is_whole_number(as_float(value))
        return isinstance(value, Tensor) and not value.is_meta and value.shape == self._shape()

    def _shape(self) -> torch.Size:
        """Returns the shape of masters and moments as they are shown."""
        tracked = self.tracked
        flat = tracked.holding.is_flat and not is_dtensor(tracked.param)
        return torch.Size([tracked.shard.numel] if flat else tracked.holding.shape)

    @outside_inference
    @torch.no_grad()
    def _write(self, name: str, value: Any) -> None:
        if name == "step":
            self.tracked.step.fill_(as_float(value))
            return
        where = f"optimizer.state of {self.tracked.shard.name}: {name}"
        with self._revealed():
            own = self._read(name)
            if value is own:
                return
            if not self._is_copied(name):
                own.copy_(value)
                return
            new = torch.empty_like(own).copy_(value)
            if not torch.equal(local_of(new), local_of(own)):  # a rounding of what was not changed would change it
                self._convert(where, name, new)

    def _convert(self, where: str, name: str, value: Tensor) -> None:
        shard, holding = self.tracked.shard, self.tracked.holding
        flat = value.view(-1) if holding.is_flat and not is_dtensor(value) else holding.part(value)
        flat = flat.to("cpu", torch.float32)
        if not all_finite(flat) or (name == "exp_avg_sq" and bool((flat < 0).any())):
            raise ArgumentError(f"{where} cannot be NaN, infinite or, as exp_avg_sq, below 0")
        if name == "master":
            shard.write_masters(flat)
        else:
            stored, form = (shard.exp_avg, EXP_AVG) if name == "exp_avg" else (shard.exp_avg_sq, EXP_AVG_SQ)
            write_moment(stored, shard.numel, form, blocks_of(flat))


def _flat(shard: Shard, name: str) -> Tensor:
    if name == "master":
        return shard.read_masters()
    return read_exp_avg(shard) if name == "exp_avg" else read_exp_avg_sq(shard)


def whole_steps(name: str, value: Any) -> int:
    """Returns the number of steps that a program has written; raises ArgumentError where it is none."""
    step = as_float(value)
    if not is_whole_number(step):
        raise ArgumentError(f"optimizer.state of {name}: step is {value!r}, expected a whole number of at least 0")
    return int(step)


class ShownStates:
    """Has the mapping that is ``optimizer.state``, and finds what the program has changed in it."""

    def __init__(self, work: Uninterrupted) -> None:
        self.mapping: defaultdict[Tensor, Any] = defaultdict(dict)
        self._work = work
        self._entries: dict[TrackedParam, ShownState] = {}
        self._partial: set[int] = set()  # ids of entries that were taken apart, and perhaps mended or replaced since

    def replace(self, mapping: defaultdict[Tensor, Any]) -> None:
        """Replaces the mapping, as torch's own class does when it assigns ``optimizer.state``."""
        self.mapping = mapping

    def show(self, tracked: TrackedParam, reveal: Callable[[Shard], None]) -> None:
        """Shows the state of a parameter. ``reveal(shard)``, of an object that this does not keep alive, is called
        before its tensors are read."""
        weak: Reveal = weakref.WeakMethod(reveal)
        given = self.mapping.get(tracked.param)
        if isinstance(given, ShownState) and given.is_of(tracked.param):
            given.follow(tracked, weak)
            self._entries[tracked] = given
            return
        entry = self._entries[tracked] = ShownState(tracked, self._work, weak, self._partial)
        if not given:  # else the program has put it there for a new parameter
            self.mapping[tracked.param] = entry

    def forget_all(self) -> None:
        """Forgets the parameters. Their entries stay, as in torch."""
        self._entries.clear()

    def state_of(self, param: Tensor) -> TrackedParam | None:
        """Returns the record of a parameter whose state is shown, though it may be in no group now."""
        entry = self.mapping.get(param)
        return entry.tracked if isinstance(entry, ShownState) and entry.is_of(param) else None

    @contextmanager
    def only(self, params: Iterable[Tensor]) -> Iterator[None]:
        """Shows no other parameters inside."""
        known = set(map(id, params))
        others = {key: self.mapping[key] for key in self.mapping if isinstance(key, Tensor) and id(key) not in known}
        for key in others:
            del self.mapping[key]
        try:
            yield
        finally:
            self.mapping.update(others)

    def find_edits(self) -> list[tuple[TrackedParam, ParamState | None]]:
        """Returns the parameters whose entries were replaced or emptied, with their new state; None: a fresh one.

        Raises ArgumentError where an entry lacks a part. Nothing is changed."""
        entries, mapping = self._entries, self.mapping
        alike = len(mapping) == len(entries) and all(map(is_, mapping.values(), entries.values()))
        if alike and not self._partial:
            return []
        self._partial.intersection_update(id(entry) for entry in entries.values() if not entry.is_whole)
        found: list[tuple[TrackedParam, ParamState | None]] = []
        for tracked, entry in entries.items():
            if not self._is_in_place(tracked, entry):
                found.append((tracked, _read_entry(tracked, mapping.get(tracked.param))))
        return found

    def take_back(self, several: Iterable[TrackedParam], reveal: Callable[[Shard], None]) -> None:
        """Shows these parameters by new entries. Old ones that the program has keep their values: call it before the
        state changes."""
        for tracked in several:
            old = weakref.ref(self._entries.pop(tracked))
            self.mapping.pop(tracked.param, None)
            alive = old()
            if alive is not None:
                alive.keep()
            self.show(tracked, reveal)

    def take_all_back(self, reveal: Callable[[Shard], None]) -> None:
        """The state will be loaded: what the program has changed in the mapping no longer counts."""
        changed = [tracked for tracked, entry in self._entries.items() if not self._is_in_place(tracked, entry)]
        self.take_back(changed, reveal)

    def _is_in_place(self, tracked: TrackedParam, entry: ShownState) -> bool:
        return entry.is_whole and self.mapping.get(tracked.param) is entry


def _read_entry(tracked: TrackedParam, given: Any) -> ParamState | None:
    where = f"optimizer.state of {tracked.shard.name}"
    advice = "it was edited: an entry has step, exp_avg and exp_avg_sq, or nothing, to start afresh"
    if given is None or (isinstance(given, Mapping) and not given):
        return None
    if isinstance(given, ShownState):  # perhaps of a parameter whose state changes before this is read
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    holding, param = tracked.holding, tracked.param
    if isinstance(given, Mapping) and holding.is_flat and not is_dtensor(param):  # shown flat, this rank's run
        given = {name: _as_run(param, value, tracked.shard.numel) for name, value in given.items()}
    try:
        return read_param(where, given, param, lambda _, value: part_of(param, holding, value))
    except ArgumentError as error:
        raise ArgumentError(f"{error}; {advice}") from error


def _as_run(param: Tensor, value: Any, numel: int) -> Any:
    if not isinstance(value, Tensor) or value.shape != (numel,):
        return value
    return Values(tuple(param.shape), value.dtype, lambda: blocks_of(value.detach().to("cpu", torch.float32)))

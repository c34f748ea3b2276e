"""Wraps the optimizer that the user or the config names: reads its settings, shows the engine's state in it.

Masters and moments are settled before they are read or written, also for checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor

from superoffload.engine.bucket import GroupHyper, Shard
from superoffload.engine.moments import EXP_AVG, EXP_AVG_SQ, read_moment, shown_dtype, stored_numel, write_moment
from superoffload.engine.placement import slab_of_zeros
from superoffload.errors import ArgumentError, StateError
from superoffload.host.bits import all_finite
from superoffload.host.signals import held_signals
from superoffload.integrations.deepspeed.config import hyper_of
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver
from superoffload.integrations.deepspeed.zero.gradients import Gradients, Ranks
from superoffload.integrations.deepspeed.zero.stock import Layout, Place, Stock

# ---- masters and moments of a sub-group, shown flat, as DeepSpeed lays them out -------------------------------------

MOMENTS = {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
MASTER = "master"


class StateOfCopies(UserDict[str, Tensor]):
    """Shows the state of a parameter that keeps some of it in other forms: each read of those makes a copy.

    It keeps no copy, also where a framework puts one back: Lightning reads and writes every entry. Its own copies and
    pickles are dictionaries of that moment, which ``torch.load`` reads.
    """

    def __init__(self, rest: dict[str, Tensor], copies: Mapping[str, Callable[[], Tensor]]) -> None:
        self._copies = copies
        super().__init__()
        self.data = {**rest, **dict.fromkeys(copies, torch.empty(0, device="cpu"))}

    def __getitem__(self, name: str) -> Tensor:
        return self._copies[name]() if name in self._copies else super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name not in self._copies:
            self.data[name] = value

    def __repr__(self) -> str:
        return repr(dict(self))

    def __copy__(self) -> Any:
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


class SubGroupState:
    """Owns the state of a sub-group's partitions.

    fp32 masters are DeepSpeed's flat buffer, fp32 and bf16 moments are flat buffers like it: these are shown. Of other
    forms readers get copies, and the flat buffer of split masters has memory only while DeepSpeed loads.
    """

    def __init__(
        self, flat: Tensor, places: Sequence[Place], *, moments: torch.dtype, split: bool, device: torch.device | None
    ) -> None:
        """Takes DeepSpeed's fp32 masters, ``flat``. ``moments``: their dtype, uint8 for 8-bit ones. ``device``: where
        the state is; None: in host memory."""
        self._master = flat
        self._numel = flat.numel()
        self._places = places
        self._members: dict[int, tuple[Place, Shard]] = {}  # by index of the shard, in the flat order
        self.split = split
        if split:
            self.masters = slab_of_zeros([place.numel for place in places], torch.int16, device)
            self.hide_masters()
        else:
            self.masters = [flat.data[place.elements] for place in places]
            for place in places:  # DeepSpeed leaves the padding uninitialized: checkpoints would differ
                flat.data[place.padding].zero_()
        self._flat: dict[str, Tensor] = {}  # moments that are kept flat
        self.moments: dict[str, list[Tensor]] = {}  # of each partition
        for name in MOMENTS:
            if moments == torch.uint8:
                lengths = [stored_numel(place.numel, moments) for place in places]
                self.moments[name] = slab_of_zeros(lengths, moments, device)
            else:
                (self._flat[name],) = slab_of_zeros([self._numel], moments, device)
                self.moments[name] = [self._flat[name][place.elements] for place in places]

    def add(self, shard: Shard) -> None:
        """Adds the shard of the next partition, which has the state that this object made for it."""
        self._members[shard.index] = self._places[len(self._members)], shard

    # ---- shown ----------------------------------------------------------------------------------------------------

    def shown(self, step: Any) -> MutableMapping[str, Any]:
        """Returns the entry of this sub-group in the state of torch's optimizer."""
        copies = {name: self._reader(name) for name in MOMENTS if name not in self._flat}
        plain: dict[str, Any] = {"step": step, **self._flat}
        return StateOfCopies(plain, copies) if copies else plain

    def _reader(self, name: str) -> Callable[[], Tensor]:
        return lambda: self.whole(name)

    def whole(self, name: str) -> Tensor:
        """Returns a moment or MASTER, flat, in fp32 or bf16: itself, or a copy with zeros as padding."""
        if name in self._flat:
            return self._flat[name]
        if name == MASTER and not self.split:
            return self._master.data
        dtype = torch.float32 if name == MASTER else shown_dtype(torch.uint8)
        found = torch.zeros(self._numel, dtype=dtype, device=self._device)
        for place, shard in self._members.values():
            found[place.elements] = _read(shard, name)
        return found

    def partition(self, shard: Shard, name: str) -> Tensor:
        """Returns a moment or MASTER of one partition in fp32, with its padding; perhaps as a view."""
        place, _ = self._members[shard.index]
        flat = self._master.data if name == MASTER and not self.split else self._flat.get(name)
        if flat is not None and flat.dtype == torch.float32:
            return flat[place.offset : place.offset + place.size]
        found = torch.zeros(place.size, dtype=torch.float32, device=self._device)
        found[: place.numel] = _read(shard, name)
        return found

    @property
    def _device(self) -> torch.device:
        return self.masters[0].device

    def placeholder(self, name: str) -> Tensor:
        """Returns a tensor that stands for a moment while others may replace it: the flat one, or an empty one."""
        return self._flat[name] if name in self._flat else torch.empty(0, device="cpu")

    # ---- written --------------------------------------------------------------------------------------------------

    def check(self, name: str, flat: Tensor) -> None:
        """Raises ArgumentError where ``flat``, with padding, has values that this form of a moment has no bits for."""
        for place, shard in self._members.values():
            check_values(shard, name, flat[place.elements])

    def write(self, name: str, flat: Tensor) -> None:
        """Overwrites a moment of all partitions by ``flat``, with padding."""
        for place, shard in self._members.values():
            overwrite(shard, name, flat[place.elements])

    def clear(self, name: str) -> None:
        """Makes a moment zero, as before the first step."""
        for stored in self.moments[name]:
            stored.zero_()

    # ---- split masters while DeepSpeed reads or writes its flat buffer --------------------------------------------

    def show_masters(self) -> None:
        """Fills DeepSpeed's flat buffer with the fp32 masters."""
        if self.split:
            self._master.data = self.whole(MASTER)

    def take_masters(self) -> None:
        """Takes over what the flat buffer has, publishes its upper halves, and gives its memory up."""
        if not self.split:
            return
        for place, shard in self._members.values():
            shard.write_masters(self._master.data[place.elements])
            assert shard.upper is not None
            shard.target().copy_(shard.upper.read())  # DeepSpeed rounds ties to even, split masters away from zero
        self.hide_masters()

    def hide_masters(self) -> None:
        """Gives up the memory of the flat buffer, whatever it has."""
        if self.split:
            self._master.data = torch.empty(0, dtype=torch.float32, device=self._master.device)


def _read(shard: Shard, name: str) -> Tensor:
    if name == MASTER:
        return shard.read_masters()
    return read_moment(_stored(shard, name), shard.numel, MOMENTS[name])


def _stored(shard: Shard, name: str) -> Tensor:
    return shard.exp_avg if name == "exp_avg" else shard.exp_avg_sq


def check_values(shard: Shard, name: str, values: Tensor) -> None:
    """Raises ArgumentError where 8-bit moments cannot take ``values``, flat: NaN, infinite, exp_avg_sq below 0."""
    if name == MASTER or _stored(shard, name).dtype != torch.uint8:
        return
    if not all_finite(values) or (name == "exp_avg_sq" and bool((values < 0).any())):
        raise ArgumentError(
            f"{shard.name}: {name} has NaN or infinite values, or, as exp_avg_sq, values below 0; 8-bit moments cannot"
        )


def overwrite(shard: Shard, name: str, values: Tensor) -> None:
    """Overwrites a moment, or the master, of one partition by flat ``values`` without padding."""
    values = values.detach().to(torch.float32)
    if name == MASTER:
        shard.write_masters(values)
    else:
        write_moment(_stored(shard, name), shard.numel, MOMENTS[name], [(0, values)])


# ---- the optimizer --------------------------------------------------------------------------------------------------


class InnerOptimizer:
    """Shows step counts and moments where DeepSpeed looks for them: in the state of torch's optimizer."""

    def __init__(self, stock: Stock, layout: Layout, states: Sequence[SubGroupState]) -> None:
        """Takes ``states``, one per sub-group."""
        self._stock = stock
        self._layout = layout
        self._states = states
        self._show([0] * len(states))

    def _entries(self) -> Iterator[tuple[Tensor, SubGroupState]]:
        """Yields the keys of torch's state, and what they stand for."""
        return zip(self._layout.masters, self._states, strict=True)

    def _show(self, steps: Sequence[int]) -> None:
        for (flat, state), done in zip(self._entries(), steps, strict=True):
            self._stock.optimizer.state[flat] = state.shown(self._step_value(done))

    # ---- settings -------------------------------------------------------------------------------------------------

    def hyper(self, group: int) -> GroupHyper:
        """Reads a param group's present hyper-parameters."""
        return hyper_of(self._stock.optimizer, group)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same on all ranks."""
        found: dict[str, Any] = {}
        for index in range(len(self._stock.optimizer.param_groups)):
            for name, value in asdict(self.hyper(index)).items():
                found[f"{name} of group {index}"] = value
        clip, scale = float(self._stock.clip_grad), float(self._stock.loss_scale)
        return {**found, "gradient_clipping": clip, "loss scale": scale}

    # ---- steps ----------------------------------------------------------------------------------------------------

    def refuse_hooks(self) -> None:
        """Refuses hooks around ``step()``, which is never called."""
        inner = self._stock.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            raise StateError("step hooks are not called under DeepSpeed; do around engine.step() what they do")

    def show_steps(self, steps: Sequence[int]) -> None:
        """Writes ``steps``, one number per sub-group, into the state."""
        for flat, done in zip(self._layout.masters, steps, strict=True):
            self._stock.optimizer.state[flat]["step"] = self._step_value(done)

    def stepped(self) -> None:
        """Marks the optimizer as stepped: torch's schedulers warn if ``step()`` was not called, and it never is."""
        self._stock.optimizer._opt_called = True

    def _step_value(self, steps: int) -> Any:
        """Converts a step count: DeepSpeedCPUAdam counts in an int, torch in a tensor."""
        return (
            steps if isinstance(self._stock.optimizer, DeepSpeedCPUAdam) else torch.tensor(float(steps), device="cpu")
        )

    # ---- loads ----------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[list[int]]:
        """Takes over what DeepSpeed loads meanwhile; the list that it yields then has each sub-group's steps.

        DeepSpeed replaces moments, or whole entries. What it leaves alone keeps its value. If it raises, or if a value
        cannot be taken over, the moments are those from before.
        """
        before = [self._put_placeholders(flat, state) for flat, state in self._entries()]
        steps: list[int] = []
        try:
            yield steps
            loaded = [self._stock.optimizer.state[flat] for flat, _ in self._entries()]
            for (_, state), entry, placeholders in zip(self._entries(), loaded, before, strict=True):
                for name in _replaced(entry, placeholders):
                    state.check(name, entry[name])
            for (_, state), entry, placeholders in zip(self._entries(), loaded, before, strict=True):
                _take(state, entry, placeholders)
            steps += [int(entry.get("step", 0)) for entry in loaded]
        finally:
            self._show(steps or [int(placeholders["step"]) for placeholders in before])

    def _put_placeholders(self, flat: Tensor, state: SubGroupState) -> dict[str, Any]:
        """Puts a plain dictionary where copies are shown, which take no values; returns what is there now."""
        entry = self._stock.optimizer.state[flat]
        plain = {"step": entry["step"], **{name: state.placeholder(name) for name in MOMENTS}}
        self._stock.optimizer.state[flat] = plain
        return dict(plain)


def _replaced(entry: Mapping[str, Any], placeholders: Mapping[str, Any]) -> list[str]:
    return [name for name in MOMENTS if name in entry and entry[name] is not placeholders[name]]


def _take(state: SubGroupState, entry: Mapping[str, Any], placeholders: Mapping[str, Any]) -> None:
    for name in MOMENTS:
        if name not in entry:  # a stock checkpoint from before the first step has no state
            state.clear(name)
    for name in _replaced(entry, placeholders):
        state.write(name, entry[name])


# ---- read and written by checkpoints and by DeepSpeed's functions ---------------------------------------------------


@dataclass(eq=False, repr=False)
class SavedState:
    """Shows readers the state of the last finished step, and takes what they load."""

    _layout: Layout
    _driver: PartitionDriver
    _inner: InnerOptimizer
    _states: Sequence[SubGroupState]
    _ranks: Ranks
    _gradients: Gradients

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self._gradients.wait()
        with held_signals():
            self._driver.engine.quiesce()

    # ---- one parameter's --------------------------------------------------------------------------------------

    def read(self, param: Any, moment: str | None) -> tuple[Tensor, int]:
        """Returns the partition of a moment (None: of the master) in fp32, with its padding, and its sub-group."""
        name = _name(moment)
        partition = self._settled(param)
        state = self._states[partition.sub_group]
        return state.partition(partition.shard, name), partition.sub_group

    def write_whole(self, param: Any, moment: str | None, value: Tensor) -> None:
        """Overwrites a moment (None: the master) by this rank's part of a tensor that has the parameter's elements."""
        whole = self._layout.numel(param)
        if value.numel() != whole:
            raise ArgumentError(f"value: {value.numel()} elements, expected the {whole} of the parameter")
        partition = self._settled(param)
        offset = partition.shard.offset
        self._overwrite(partition, _name(moment), value.flatten()[offset : offset + partition.shard.numel])

    def write_part(self, param: Any, moment: str | None, value: Tensor) -> None:
        """Overwrites a moment (None: the master) by this rank's partition, with its padding."""
        if value.numel() != param.ds_tensor.numel():
            raise ArgumentError(f"value: {value.numel()} elements, expected {param.ds_tensor.numel()}, with padding")
        partition = self._settled(param)
        self._overwrite(partition, _name(moment), value.flatten()[: partition.shard.numel])

    def _overwrite(self, partition: Partition, name: str, values: Tensor) -> None:
        check_values(partition.shard, name, values)
        overwrite(partition.shard, name, values)

    def _settled(self, param: Any) -> Partition:
        """Brings one parameter's master and moments to the last finished step, so that they may be written."""
        self._gradients.wait()
        self._ranks.look()
        key = self._layout.key(param)
        self._driver.settle(key)
        return self._driver.partitions[key]

    # ---- all of it ------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Takes over the state that DeepSpeed loads meanwhile."""
        try:
            with self.writing_masters(), self._inner.loading() as steps:
                yield
        except ArgumentError as error:  # found behind DeepSpeed's own load, which has changed parameters
            raise StateError(f"{error}. The checkpoint is loaded in part: load an undamaged one") from error
        self._driver.set_steps(steps)
        self._ranks.loaded(max(steps))

    @contextmanager
    def writing_masters(self) -> Iterator[None]:
        """Takes over what DeepSpeed writes into its flat fp32 buffers meanwhile; nothing of it if it raises."""
        try:
            for state in self._states:
                state.show_masters()
            yield
            for state in self._states:
                state.take_masters()
        finally:
            for state in self._states:
                state.hide_masters()

    def masters(self) -> list[Tensor] | None:
        """Copies the fp32 masters of all sub-groups; None: DeepSpeed's flat buffers have them."""
        if not any(state.split for state in self._states):
            return None
        return [state.whole(MASTER).requires_grad_() for state in self._states]

    def digests(self) -> dict[str, str]:
        """Returns SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        self.synchronize()
        return self._driver.engine.digests()


def _name(moment: str | None) -> str:
    if moment is None:
        return MASTER
    if moment not in MOMENTS:
        raise ArgumentError(f"optim_state_key={moment!r}: expected one of {', '.join(map(repr, MOMENTS))}")
    return moment

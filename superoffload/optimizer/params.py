"""Parameters become shards of the engine and get their state when they are adopted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from superoffload.distributed.ownership import Holding
from superoffload.distributed.rank_checks import Held
from superoffload.distributed.session import RankSetup
from superoffload.engine.bucket import Shard
from superoffload.engine.engine import Engine
from superoffload.engine.moments import check_axes, noise_stream
from superoffload.engine.placement import make_state, take_state
from superoffload.errors import StateError
from superoffload.optimizer.arguments import ConstructorArguments, check_apart, check_finite, check_parameter
from superoffload.optimizer.gradient_source import dtype_to_come
from superoffload.optimizer.settings import ParamGroups
from superoffload.optimizer.shown_state import ShownStates, whole_steps
from superoffload.optimizer.state_dict import ShownSteps
from superoffload.optimizer.tracked_param import TrackedParam, remember_values

_EXACT = 1 << 24  # float32 has every whole number below


class Params:
    """Owns a ``TrackedParam`` for each parameter that trains: its shard in the engine, its name, this rank's part."""

    def __init__(
        self,
        engine: Engine,
        setup: RankSetup,
        names: Mapping[int, str],
        resident: Collection[int],
        given: ConstructorArguments,
        groups: ParamGroups,
        views: ShownStates,
        kept: Mapping[Tensor, TrackedParam],
    ) -> None:
        """``kept``: parameters that have state already, of which no engine knows. ``names``: of the model's parameters,
        by id. ``resident``: ids of those whose state begins on the device."""
        self._engine = engine
        self._setup = setup
        self._names = names
        self._resident = resident
        self._state_dtype = given.state_dtype
        self._split_masters = given.split_masters
        self._seed = given.seed
        self._groups = groups
        self._views = views
        self._kept = dict(kept)
        self._tracked: dict[Tensor, TrackedParam] = {}
        self._of_shard: dict[int, TrackedParam] = {}
        self._fresh: list[Held] = []  # not announced to other ranks yet
        self._shown_steps: dict[ShownSteps, dict[int, TrackedParam]] = {}  # by place
        self.has_masters = False  # masters have other values than the parameters

    # ---- known parameters -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TrackedParam]:
        return iter(self._tracked.values())

    def __contains__(self, param: Tensor) -> bool:
        return param in self._tracked

    def __getitem__(self, param: Tensor) -> TrackedParam:
        return self._tracked[param]

    def without_state(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns those without state: frozen ones, and those that train for the first time."""
        known = self._tracked
        return [param for param in params if param not in known]

    def get(self, param: Tensor) -> TrackedParam | None:
        return self._tracked.get(param)

    def of_shard(self, index: int) -> TrackedParam | None:
        return self._of_shard.get(index)

    def of_shards(self, indices: set[int]) -> list[TrackedParam]:
        """Returns those of these shards, in registration order."""
        return [self._of_shard[index] for index in sorted(indices)]

    def trains(self, param: Tensor) -> bool:
        """Returns whether a parameter needs its record at once."""
        return param.requires_grad or param in self._kept

    def named(self, group: int) -> Iterator[tuple[str, Tensor]]:
        return self._groups.named(group, self._names)

    def holding_of(self, param: Tensor) -> Holding:
        """Returns the part of a parameter whose state this rank has, or would have if it trained."""
        tracked = self._tracked.get(param)
        return tracked.holding if tracked is not None else self._setup.holding_of("state_dict", param)

    def forget_all(self) -> None:
        """Forgets all parameters."""
        self._tracked.clear()
        self._shown_steps.clear()
        self._of_shard.clear()
        self._fresh.clear()
        self._views.forget_all()

    # ---- new parameters ---------------------------------------------------------------------------------------

    def take_fresh(self) -> list[Held]:
        """Returns those that were adopted since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def adopt(self, group: int, params: Sequence[Tensor]) -> list[TrackedParam]:
        """Makes records for those of a group's ``params`` that have none yet, and state where there is none."""
        wanted = {id(param) for param in params if param not in self._tracked}
        fresh = {param: name for name, param in self.named(group) if id(param) in wanted}
        for param, name in fresh.items():  # a frozen one may have changed since its group was checked
            check_parameter(name, param)
            check_finite(name, param)
        holdings = {param: self._setup.holding_of(name, param) for param, name in fresh.items()}
        rounded = self._state_dtype is not torch.float32
        axes = [check_axes(name, holdings[param].axes) if rounded else () for param, name in fresh.items()]
        sizes = [holding.part(param).numel() for param, holding in holdings.items()]
        resident = [id(param) in self._resident for param in fresh]
        split = [self._split_masters and param.dtype == torch.bfloat16 for param in fresh]
        master_dtypes = [torch.int16 if its else torch.float32 for its in split]
        kept = [self._kept.pop(param, None) for param in fresh]
        placer = self._engine.layout.placer
        lacking = [0 if one is not None else size for one, size in zip(kept, sizes, strict=True)]
        states = make_state(lacking, master_dtypes, self._state_dtype, resident, placer)
        found: list[TrackedParam] = []
        steps = ShownSteps(len(fresh))
        for i, (param, name) in enumerate(fresh.items()):
            master, exp_avg, exp_avg_sq = states[i]
            index = len(self._engine.shards) + len(found)
            shard = Shard(
                index=index,
                name=name,
                group=group,
                numel=sizes[i],
                gradient_dtype=dtype_to_come(name, param),
                published_dtype=param.dtype,
                master=master,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                target=_target(param, holdings[param]),
                parameter=param if holdings[param].is_memory_of(param) else None,
                noise_stream=noise_stream(self._seed, name),
                offset=holdings[param].start,
                axes=axes[i],
                resident=resident[i],
                reduced_later=self._setup.is_reduced_later(param),
            )
            before = kept[i]
            if before is not None:
                device = placer.residency.device if placer is not None and resident[i] else None
                take_state(shard, before.shard, device)
                shard.follow(shard.target())  # it may have been written while it was in no group
            elif split[i]:
                shard.splits_master()
            else:
                master.copy_(shard.target())
            shown = (steps, i) if before is None else (before.steps, before.number)
            found.append(self._track(param, shard, holdings[param], *shown))
            if before is not None:
                found[-1].take_over(before)
        if found:
            self._engine.layout.add_shards([tracked.shard for tracked in found])
        remember_values(found)
        return found

    def _track(self, param: Tensor, shard: Shard, holding: Holding, steps: ShownSteps, number: int) -> TrackedParam:
        link = self._engine.link
        # Where a link writes parameters on the CPU later, their bits before that mean nothing.
        readable = param.is_cuda or link.bit_sums.in_stream_order or not link.asynchronous
        tracked = TrackedParam(param, shard, steps, number, holding, link.bit_sums, readable=readable)
        self._shown_steps.setdefault(steps, {})[number] = tracked
        self._tracked[param] = self._of_shard[shard.index] = tracked
        self._views.show(tracked, self.reveal)
        self._fresh.append(Held(shard.name, param, shard, holding))
        return tracked

    def check_apart(self) -> None:
        """Raises where parameters that have moved since they were adopted share memory with others now."""
        moved = [tracked for tracked in self if tracked.was_moved]
        if moved:
            check_apart((tracked.shard.name, tracked.param) for tracked in self)
        for tracked in moved:
            tracked.move_apart()

    def mark_final(self, indices: Iterable[int]) -> None:
        """Notes that gradients of these shards are final when their hooks run, since no other rank has them."""
        for index in indices:
            self._of_shard[index].shard.gradient_is_final()

    def count_steps(self, moved: Collection[TrackedParam]) -> None:
        """Counts the step that has ended for those that it moved."""
        all_moved = len(moved) == len(self._tracked)
        for steps, members in self._shown_steps.items():
            steps.count(members if all_moved else [place for place, tracked in members.items() if tracked in moved])

    # ---- state that the program sees and edits ----------------------------------------------------------------

    def reveal(self, shard: Shard) -> None:
        """Brings the state of a shard to the end of the last finished step, before the program reads or writes it."""
        self._engine.reveal(shard)

    def shown_alone(self) -> AbstractContextManager[None]:
        """Returns a context in which ``optimizer.state`` shows no parameter that is in no group."""
        return self._views.only(self._groups.params())

    def show_all_again(self) -> None:
        """Forgets what the program has changed in the structure of ``optimizer.state``, since a load follows."""
        self._views.take_all_back(self.reveal)

    def follow_state_edits(self) -> None:
        """Takes over what the program has changed in the structure of ``optimizer.state``, and numbers of steps.

        Raises ArgumentError, with nothing changed, where an entry lacks a part or a number of steps is none."""
        edits, steps = self._views.find_edits(), self._find_steps()
        for tracked in {*(tracked for tracked, _ in edits), *steps}:
            self.reveal(tracked.shard)
        for tracked, step in steps.items():
            tracked.set_steps(step)
        self._views.take_back([tracked for tracked, _ in edits], self.reveal)
        for tracked, values in edits:
            tracked.load(values)
        for shown in self._shown_steps:
            shown.all_seen()

    def _find_steps(self) -> dict[TrackedParam, int]:
        """Returns the parameters whose number of steps was written, with the new one."""
        found: dict[TrackedParam, int] = {}
        for steps, members in self._shown_steps.items():
            for place, shown in steps.looked_at(members):
                tracked = members[place]
                known = tracked.shown_steps
                if shown != known and min(shown, known) < _EXACT:
                    found[tracked] = whole_steps(tracked.shard.name, shown)
        return found

    # ---- changed groups ---------------------------------------------------------------------------------------

    def keep_masters(self) -> None:
        """Notes that masters have bits that the parameters lack."""
        self.has_masters = True

    @property
    def are_regrouped(self) -> bool:
        """Returns whether the program has changed the groups' parameters since these were adopted."""
        return self._groups.changed()

    def state_to_keep(self) -> dict[Tensor, TrackedParam]:
        """Returns the records of the parameters that are in the groups now, also of those that come back to them.

        Raises where new parameters have taken the place of others whose state would be lost silently."""
        params = self._groups.params()
        grouped = set(map(id, params))
        gone = [t.shard.name for t in self if id(t.param) not in grouped and (self.has_masters or t.shard.steps)]
        shown = {param: self._views.state_of(param) for param in params}
        new = [param for param in self._groups.added() if param not in self._views.mapping]
        if new and any(self._views.state_of(t.param) for t in self if t.shard.name in gone):
            raise StateError(
                f"param_groups: {gone[0]} was taken out and others put in, after state was made for it; to give that "
                "state up delete it (del optimizer.state[parameter]), or make a new optimizer from the parameters that "
                "are to be trained (with Accelerate: prepare before load_masters())"
            )
        kept = {param: tracked for param, tracked in shown.items() if tracked is not None}
        for tracked in kept.values():
            tracked.check_still_fits()
        return kept


def _target(param: Tensor, holding: Holding) -> Callable[[], Tensor]:
    return lambda: holding.part(param)

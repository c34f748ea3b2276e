"""``superoffload.AdamW`` is assembled here: each part gets the parts that it needs, and none knows ``AdamW`` itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor

from superoffload.distributed.session import RankSetup, qualified_names, set_up_ranks
from superoffload.engine.bucket import GroupHyper
from superoffload.engine.engine import Engine
from superoffload.engine.options import EngineOptions, Listener, Recorder
from superoffload.engine.placement import placer_for
from superoffload.engine.stats import total
from superoffload.errors import ArgumentError, SuperOffloadError
from superoffload.host.processors import worker_cpus
from superoffload.host.tensors import is_dtensor
from superoffload.links.select import keeps_gradients, link_for, on_device
from superoffload.optimizer import frameworks
from superoffload.optimizer.accumulation import Accumulation, HostAccumulation
from superoffload.optimizer.advice import NOTHING_EARLY, Advice
from superoffload.optimizer.arguments import ConstructorArguments, as_groups, check_groups, named_in
from superoffload.optimizer.delivery import Delivery, OnDemand
from superoffload.optimizer.edits import Edits
from superoffload.optimizer.frameworks import Reductions, follow_reductions, reducing
from superoffload.optimizer.freed_gradients import FreedGradients
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.intake import Intake
from superoffload.optimizer.lifetime import Lifetime, weakly
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.other_ranks import OtherRanks, Ranks
from superoffload.optimizer.params import Params
from superoffload.optimizer.placeholder import GradientPlaceholder
from superoffload.optimizer.settings import ClipSettings, ParamGroups
from superoffload.optimizer.shown_state import ShownStates
from superoffload.optimizer.state import Sleep, State
from superoffload.optimizer.step import Step
from superoffload.optimizer.tracked_param import TrackedParam, end_all

_NO_STATE: Mapping[Tensor, TrackedParam] = MappingProxyType({})


@dataclass(eq=False, repr=False)
class PermanentParts:
    """Holds the parts that stay when other parameters replace those that an optimizer was made for."""

    lifetime: Lifetime
    groups: ParamGroups
    clipping: ClipSettings
    given: ConstructorArguments
    recorder: Recorder

    def __post_init__(self) -> None:
        self.accumulation = Accumulation(fp32=self.given.fp32_sums)
        self.reductions = Reductions()
        self.views = ShownStates(self.lifetime.work)
        self.earlier: dict[str, float | int] = {}  # totals of engines before the last change of groups
        self.has_looked = False  # for a model that reduces gradients

    def follow_reductions(self) -> None:
        """Follows the model, if it reduces gradients over the ranks."""
        model = self.given.model()
        if model is not None and type(self.reductions) is Reductions:
            self.reductions = follow_reductions(model, self.lifetime.alone)

    def say_whose_norm(self, ranks: Ranks) -> None:
        """Warns once, on the first rank of a group, where other ranks clip by other norms."""
        if ranks.setup.first:
            self.clipping.say_whose_norm(ranks.setup.sharing, ranks.setup.world)

    def check_group(self, param_group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """Checks a group that will be added; returns it with its parameters in a list."""
        (group,) = as_groups([param_group])
        check_groups([group], defaults, taken=self.groups.params())
        self.accumulation.fp32.check_params(named_in([group]), self.given.model())
        return group

    def count_until_now(self, totals: dict[str, float | int]) -> None:
        """Keeps the totals of an engine that has ended."""
        self.earlier = totals

    def check_all_groups(self) -> None:
        """Checks groups that the program has changed."""
        check_groups(self.groups.now, {})

    def check_sums(self, params: Params) -> None:
        """Checks that gradients of all parameters in the groups can be accumulated in fp32, if that was asked for."""
        named = [one for index in range(len(self.groups.now)) for one in params.named(index)]
        self.accumulation.fp32.check_params(named, self.given.model())


@dataclass(frozen=True)
class Parts:
    """Holds the parts that are made for one set of parameters. A part knows only those before it."""

    engine: Engine
    params: Params
    advice: Advice
    ranks: Ranks
    intake: Intake
    delivery: Delivery
    step: Step
    state: State
    sleep: Sleep

    def adopt(self, permanent: PermanentParts, group: int) -> None:
        """Adopts the parameters of a group that train."""
        permanent.accumulation.fp32.begin(self.params.named(group), permanent.given.model())
        params = permanent.groups.now[group]["params"]
        self.intake.adopt(group, [param for param in params if self.params.trains(param)])

    def adopt_all(self, permanent: PermanentParts) -> None:
        """Adopts the parameters of all groups and announces them to other ranks."""
        for index in range(len(permanent.groups.now)):
            self.adopt(permanent, index)
        self.ranks.announce()
        self.intake.hook()  # parameters that no other rank has, as is known now

    def refresh_written(self) -> None:
        """Has masters take over the writes to parameters that are noticed, as every ``step()`` does."""
        self.state.follow_written()
        self.advice.tell()

    def placement(self) -> dict[str, Any] | None:
        """Returns the value of ``AdamW.placement``."""
        placer = self.engine.layout.placer
        if placer is None:
            return None
        found = self.engine.stats()["params_on_device"]
        return {"gpu_fraction": placer.fraction, "params_on_device": found, "why": placer.why}

    def stats(self, permanent: PermanentParts) -> dict[str, float | int]:
        """Returns the value of ``AdamW.stats()``."""
        return total(self.engine.stats(), permanent.earlier)

    def follow_found_model(self, permanent: PermanentParts) -> bool:
        """Looks once, in the first step, for a model that reduces our gradients over ranks and was not given; returns
        whether every rank has found it, so that new parts follow it. Not where an argument excludes that."""
        setup, given = self.ranks.setup, permanent.given
        if permanent.has_looked or setup.world == 1:
            return False
        permanent.has_looked = True
        plain = not any(map(is_dtensor, permanent.groups.params()))
        late = plain and not setup.reduced and given.speculation != "never"
        may_follow = late and given.keep_grads is not False and not given.fp32_sums
        model = reducing([tracked.param for tracked in self.params]) if may_follow else None
        followed: Reductions | None = None
        if model is not None:
            with suppress(ArgumentError):  # the program has registered a communication hook
                followed = follow_reductions(model, permanent.lifetime.alone)
        if self.ranks.all_say("step 1: looking for a model that reduces gradients", followed is not None):
            assert model is not None and followed is not None
            permanent.reductions, permanent.given = followed, replace(given, model=ref(model))
            return True
        waited = any(gradient_of(one.param) is not None for one in self.params)
        none_early = all(one.shard.reduced_later for one in self.params)
        if late and waited and setup.first and self.ranks.session and none_early:
            self.advice.keep(NOTHING_EARLY)
        return False

    # ---- changed groups ---------------------------------------------------------------------------------------

    def regrouped(self, permanent: PermanentParts) -> Parts:
        """Ends these parts and returns new ones for the parameters that the groups have now, with their state and
        gradients; raises, and changes nothing, where the groups cannot be used."""
        permanent.check_all_groups()
        self.delivery.check_new(permanent.groups.added())
        self.state.follow_written()
        self.params.follow_state_edits()
        kept = self.params.state_to_keep()
        permanent.check_sums(self.params)
        self.intake.give_back()
        self.engine.sleep()  # all state is in memory of its own then
        if not kept:  # else gradients in fp32 may wait for step()
            permanent.accumulation.fp32.end()
        self._remove_hooks()
        self.engine.close()
        permanent.count_until_now(self.stats(permanent))
        self.params.forget_all()
        try:
            parts = assemble(permanent, permanent.groups.params(), kept)
            if self.params.has_masters:
                parts.params.keep_masters()
            parts.adopt_all(permanent)
        except SuperOffloadError as error:  # which says elsewhere that all is as it was
            raise RuntimeError(f"the optimizer could not go on with its changed param_groups: {error}") from error
        permanent.groups.accept()
        return parts

    def end(self, permanent: PermanentParts) -> None:
        """Closes the recorder, lets go of gradients and removes all hooks, once the engine is closed."""
        permanent.recorder.close()
        end_all(tracked.gradient for tracked in self.params)
        permanent.accumulation.fp32.end()
        permanent.reductions.give_to(None)
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Removes hooks from parameters and modules, which may outlive the optimizer."""
        self.intake.remove_hooks()
        self.delivery.remove_hooks()


def assemble(
    permanent: PermanentParts, params: Sequence[Tensor], kept: Mapping[Tensor, TrackedParam] = _NO_STATE
) -> Parts:
    """Makes the parts for ``params``, which are adopted later, group by group. ``kept``: those that have state."""
    lifetime, groups, clipping, given = permanent.lifetime, permanent.groups, permanent.clipping, permanent.given
    try:
        permanent.follow_reductions()
        names, listener = qualified_names(given.model()), Listener()
        engine, setup, resident = set_up_engine(given, params, names, groups.hyper, listener, permanent.recorder)
    except BaseException:
        permanent.recorder.close()
        raise
    advice = Advice()
    owned = Params(engine, setup, names, resident, given, groups, permanent.views, kept)
    master_updates = MasterUpdates(engine, advice)
    alone = setup.session is None
    ranks = Ranks(setup, owned) if alone else OtherRanks(setup, owned, engine, master_updates)
    delivery = Delivery(lifetime, engine)
    if given.on_demand:
        delivery = OnDemand(lifetime, engine, owned, master_updates, given.model, params)
    freed = FreedGradients(lifetime, engine, owned, HostAccumulation(engine, wanted=given.fp32_sums), advice)
    listener.packed, listener.making_way = weakly(freed.packed), weakly(freed.making_way)
    if isinstance(delivery, OnDemand):
        listener.landing, listener.landed = weakly(delivery.landing), weakly(delivery.landed)
    intake = Intake(lifetime, engine, owned, permanent.accumulation, freed, master_updates, ranks, clipping)
    permanent.reductions.give_to(intake)
    edits = Edits(engine, owned, intake, master_updates, permanent.accumulation, advice)
    step = Step(
        engine,
        groups,
        owned,
        ranks,
        intake,
        edits,
        delivery,
        permanent.reductions,
        master_updates,
        clipping,
        advice,
        given.fp32_sums,
    )
    state = State(lifetime, engine, groups, owned, ranks, intake, step, master_updates)
    sleep = Sleep(lifetime, engine, owned, state)
    return Parts(engine, owned, advice, ranks, intake, delivery, step, state, sleep)


def set_up_engine(
    given: ConstructorArguments,
    params: Sequence[Tensor],
    names: dict[int, str],
    hyper_of: Callable[[int], GroupHyper],
    listener: Listener,
    recorder: Recorder,
) -> tuple[Engine, RankSetup, set[int]]:
    """Joins the other ranks, where there are any, and makes an engine; no parameter has state yet.

    ``names``: of the model's parameters, by id. Also returns the ids of those whose state begins on the device."""
    model = given.model()
    reduced = frameworks.reduces_later(model)
    ranks = set_up_ranks(
        params,
        reduced=reduced,
        forward_view=lambda: frameworks.forward_view(model),
        replicated=given.replicated,
        check=given.check,
        process_group=given.process_group,
        timeout=given.rank_timeout,
        gradient_of=_in_memory,
    )
    cpus = worker_cpus(given.threads, ranks.cpus, beside_device=on_device(params))
    keep_grads = keeps_gradients(params, given.keep_grads, reduced=reduced)
    sizes = _sizes(params, names, ranks) if given.placement is not None else []
    # Nothing is stepped early or late then, so that on the CPU gradients and parameters need no second copy.
    at_once = given.speculation == "never" and not given.on_demand
    link = link_for(params, keep_grads=keep_grads, in_place=at_once)
    options = EngineOptions(given.speculation, given.bucket_numel, cpus, two_phase=not link.in_place)
    try:
        placer = placer_for(given.placement, link, params)
    except BaseException:
        link.close()
        raise
    resident = placer.choose_first(sizes) if placer is not None else set()
    engine = Engine(link, options, hyper_of, listener=listener, recorder=recorder, placer=placer)
    return engine, ranks, resident


def _in_memory(param: Tensor) -> Tensor | None:
    """Returns the gradient of ``param``, unless it was packed and freed."""
    gradient = gradient_of(param)
    return None if isinstance(gradient, GradientPlaceholder) else gradient


def _sizes(params: Sequence[Tensor], names: dict[int, str], ranks: RankSetup) -> list[tuple[int, int]]:
    """Returns (id, number of elements whose state this rank has) of all parameters that train."""
    trained = [param for param in params if param.requires_grad]
    named = [(names.get(id(param), "params"), param) for param in trained]
    return [(id(param), ranks.holding_of(name, param).part(param).numel()) for name, param in named]

"""Param groups: from parameters to shards and the state that is made for them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.arguments import as_groups, check_finite, check_group, check_groups, check_parameter, named_in
from superoffload.bucket import Bucket, GroupHyper, Shard
from superoffload.cpus import worker_cpus
from superoffload.engine.engine import Engine, EngineOptions
from superoffload.engine.listener import Listener
from superoffload.engine.recorder import Recorder
from superoffload.errors import StateError, SuperOffloadError
from superoffload.gradient_source import dtype_to_come
from superoffload.links import keeps_gradients, link_for, on_device
from superoffload.optimizer.fp32_sums import Fp32Sums, check_fp32_sums
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.untraced import untraced
from superoffload.placement import Asked, make_state, placer_for
from superoffload.ranks.held import Held
from superoffload.ranks.layout import Holding, like_parameter
from superoffload.ranks.setup import qualified_names, set_up_ranks
from superoffload.tracked import Tracked, remember_values


@dataclass(frozen=True)
class Given:
    """Arguments that are needed again where an optimizer starts anew on other parameters."""

    speculation: str
    delivery: str
    bucket_numel: int | None
    threads: int | None
    replicated: str
    check: tuple[bool, int]
    process_group: Any
    rank_timeout: float | None
    model: weakref.ReferenceType[nn.Module] | None
    keep_grads: bool | None
    placement: Asked
    fp32_sums: bool


class Parameters(Lifetime):
    """Which parameters there are, whose shards they are, and their state in host memory."""

    _constructing = True
    _recorder: Recorder
    _has_masters = False  # other than the parameters' values

    def _begin_with(self, given: Given, state_dtype: torch.dtype, seed: int) -> None:
        self._given = given
        self._state_dtype = state_dtype
        self._seed = seed
        self._tracked: dict[Tensor, Tracked] = {}
        self._of_shard: dict[int, Tracked] = {}
        self._fresh: list[Held] = []
        self._firsts: list[int] = []  # id of the first parameter of each group
        self._sums = Fp32Sums(wanted=given.fp32_sums)
        self._resident: set[int] = set()  # ids of parameters whose state begins on the accelerator

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """As in torch. The tensors are those that are stepped: after a two-phase step they follow a little later, so
        read them anew from here, which waits for that, or after ``synchronize()``."""
        if not self._out_of_use():
            with self._whole():
                self._core.settle()
        return self._state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._state = value

    def _model(self) -> nn.Module | None:
        return self._given.model() if self._given.model is not None else None

    def _connect(self, params: Sequence[Tensor]) -> None:
        """To the other ranks, where there are any, and to a new core."""
        given, model = self._given, self._model()
        self._names = qualified_names(model)
        self._ranks = set_up_ranks(
            params,
            model,
            replicated=given.replicated,
            check=given.check,
            process_group=given.process_group,
            timeout=given.rank_timeout,
        )
        cpus = worker_cpus(given.threads, self._ranks.cpus, beside_device=on_device(params))
        options = EngineOptions(given.speculation, given.bucket_numel, cpus, two_phase=True)
        keep_grads = keeps_gradients(params, given.keep_grads, model)
        sizes = self._sizes(params) if given.placement is not None else []
        link = link_for(params, keep_grads=keep_grads)
        try:
            placer = placer_for(given.placement, link, params)
        except BaseException:
            link.close()
            raise
        self._resident = placer.choose_first(sizes) if placer is not None else set()
        self._core = Engine(
            link, options, _hyper_reader(self), listener=self._listener(), recorder=self._recorder, placer=placer
        )

    def _listener(self) -> Listener:
        return Following(self)

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        self._sums.end()

    def _sizes(self, params: Sequence[Tensor]) -> list[tuple[int, int]]:
        """(id, elements that this rank has the state of) of all that trains."""
        trained = [param for param in params if param.requires_grad]
        named = [(self._names.get(id(param), "params"), param) for param in trained]
        return [(id(param), self._ranks.holding_of(name, param).part(param).numel()) for name, param in named]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at any time; a step in flight keeps its gradients."""
        group = param_group
        if not self._constructing:  # the constructor has checked all groups already
            self._check_usable()
            (group,) = as_groups([param_group])
            check_groups([group], self.defaults, taken=[p for g in self.param_groups for p in g["params"]])
            if self._sums.wanted:
                check_fp32_sums(named_in([group]), self._model())
        with self._work.alone:
            super().add_param_group(group)  # may refuse, as where some groups have names and others have not
            with self._whole():
                self._firsts.append(id(group["params"][0]) if group["params"] else 0)
                self._sums.begin(self._names_of(len(self.param_groups) - 1), self._model())
                self._adopt(len(self.param_groups) - 1, [p for p in group["params"] if p.requires_grad])
                if not self._constructing:
                    self._announce()

    def _announce(self) -> None:
        """Tells the other ranks which parameters are new; they must have the same ones."""
        fresh, self._fresh = self._fresh, []
        if fresh and self._ranks.session is not None:
            self._ranks.session.add(fresh)

    def _adopt(self, group: int, params: Sequence[Tensor]) -> None:
        """State for those parameters of a group that have none yet: frozen ones take no memory."""
        wanted = {id(param) for param in params if param not in self._tracked}
        fresh = {param: name for name, param in self._names_of(group) if id(param) in wanted}
        for param, name in fresh.items():  # again: what was frozen may have changed since its group was made
            check_parameter(name, param)
            check_finite(name, param)
        holdings = {param: self._ranks.holding_of(name, param) for param, name in fresh.items()}
        sizes = [holding.part(param).numel() for param, holding in holdings.items()]
        resident = [id(param) in self._resident for param in fresh]
        dtypes = (torch.float32, self._state_dtype, self._state_dtype)
        states = make_state(sizes, dtypes, resident, self._core.placer)
        shards: list[Shard] = []
        for i, (param, name) in enumerate(fresh.items()):
            master, exp_avg, exp_avg_sq = states[i]
            index = len(self._core.shards) + len(shards)
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
                noise_stream=self._seed << 32 | index,
                offset=holdings[param].start,
                resident=resident[i],
            )
            master.copy_(shard.target())
            shards.append(shard)
            self._track(param, shard, holdings[param])
        if shards:
            self._core.add_shards(shards)
        remember_values([self._of_shard[shard.index] for shard in shards])

    def _track(self, param: Tensor, shard: Shard, holding: Holding) -> Tracked:
        step = torch.zeros((), dtype=torch.float32)
        link = self._core.link
        # Where a link has parameters of the CPU written later, nothing can be said of their bits before.
        readable = param.is_cuda or link.bit_sums.in_stream_order or not link.asynchronous
        early = self._ranks.is_early(param)
        tracked = Tracked(param, shard, step, holding, link.bit_sums, early=early, readable=readable)
        self._tracked[param] = self._of_shard[shard.index] = tracked
        self._show_state(tracked)
        self._fresh.append(Held(shard.name, param, shard, holding))
        return tracked

    def _show_state(self, tracked: Tracked) -> None:
        param, holding, shard = tracked.param, tracked.holding, tracked.shard
        self._state[param] = {
            "step": tracked.step,
            "exp_avg": like_parameter(param, holding, shard.exp_avg),
            "exp_avg_sq": like_parameter(param, holding, shard.exp_avg_sq),
            "master": like_parameter(param, holding, shard.master),
        }

    def _on_moved(self, shard: Shard) -> None:
        self._show_state(self._of_shard[shard.index])

    def _names_of(self, group: int) -> Iterator[tuple[str, Tensor]]:
        params = self.param_groups[group]["params"]
        names = self.param_groups[group].get("param_names")
        for i, param in enumerate(params):
            name = str(names[i]) if names else f"param_groups[{group}]['params'][{i}]"
            yield self._names.get(id(param), name), param

    def _hyper_of(self, group: int) -> GroupHyper:
        values = self.param_groups[group]
        check_group(values)  # they may have been changed since the last step
        beta1, beta2 = values["betas"]
        return GroupHyper(
            float(values["lr"]), float(beta1), float(beta2), float(values["eps"]), float(values["weight_decay"])
        )

    # ---- parameters that others put in their place ------------------------------------------------------------

    def _check_usable(self, *, closed_too: bool = False, to_load: bool = False) -> None:
        super()._check_usable(closed_too=closed_too, to_load=to_load)
        if not self._closed:
            self._follow_replaced()

    @untraced
    def _follow_replaced(self) -> None:
        """Accelerate puts sharded parameters into the groups when it prepares a model for FSDP2: starts anew on them.

        Not once there is state that would be lost.
        """
        groups = [group["params"] for group in self.param_groups]
        firsts = [id(params[0]) if params else 0 for params in groups]
        if firsts == self._firsts:
            return
        params = [param for members in groups for param in members]
        grouped = {id(param) for param in params}
        if self._has_masters or any(t.shard.steps or id(param) in grouped for param, t in self._tracked.items()):
            self._refuse_replaced()
            return
        if self._sums.wanted:
            check_fp32_sums([one for index in range(len(groups)) for one in self._names_of(index)], self._model())
        with self._whole():
            self._remove_hooks()
            self._core.close()
            self._tracked.clear()
            self._of_shard.clear()
            self.state.clear()
            self._fresh.clear()
            self._connect(params)
            self._firsts = firsts
            for index, members in enumerate(groups):
                self._sums.begin(self._names_of(index), self._model())
                self._adopt(index, [param for param in members if param.requires_grad])
            self._announce()

    def _refuse_replaced(self) -> None:
        """A parameter that is new may have taken another one's place, whose state would be lost silently."""
        grouped = {id(param) for group in self.param_groups for param in group["params"]}
        gone = [tracked.shard.name for param, tracked in self._tracked.items() if id(param) not in grouped]
        if gone:
            raise StateError(
                f"param_groups: {gone[0]} was taken out and others put in, after state was made for it; make a new "
                "optimizer, from the parameters that are to be trained (with Accelerate: prepare before load_masters())"
            )


class Following(Listener):
    """Tells an optimizer what its core does, and does not keep it alive."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def packed(self, shard: Shard) -> None:
        alive = self._optimizer()
        if alive is not None:
            alive._on_packed(shard)

    def making_way(self) -> None:
        alive = self._optimizer()
        if alive is not None:
            alive._keep_what_is_shown()

    def moved(self, shard: Shard) -> None:
        alive = self._optimizer()
        if alive is not None:
            alive._on_moved(shard)

    def landing(self, buckets: Sequence[Bucket]) -> None:
        alive = self._optimizer()
        if alive is not None and alive._on_demand:
            alive._before_landing(buckets)

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        alive = self._optimizer()
        if alive is None or not alive._on_demand:
            return None
        found: SuperOffloadError | None = alive._after_landing(buckets)
        return found


def _target(param: Tensor, holding: Holding) -> Callable[[], Tensor]:
    return lambda: holding.part(param)


def _hyper_reader(optimizer: Parameters) -> Callable[[int], GroupHyper]:
    """Does not keep the optimizer alive, so that it goes when its last user lets go of it."""
    reference = weakref.ref(optimizer)

    def hyper_of(group: int) -> GroupHyper:
        alive = reference()
        assert alive is not None, "the core is used by its optimizer only"
        return alive._hyper_of(group)

    return hyper_of

"""Puts the parts of one optimizer together, over the layout of a stage; none of them knows the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from superoffload.engine.bucket import Shard
from superoffload.engine.moments import noise_stream
from superoffload.engine.options import EngineOptions
from superoffload.errors import ArgumentError, StateError
from superoffload.host.environment import check_environment
from superoffload.integrations.deepspeed.config import (
    OPTIONS_KEY,
    Options,
    check_arguments,
    check_optimizer,
    load,
    read_options,
)
from superoffload.integrations.deepspeed.driver import Partition, PartitionDriver, accelerator_link, check_resident
from superoffload.integrations.deepspeed.partitions import cpus_of_this_rank, open_session
from superoffload.integrations.deepspeed.zero.gradients import Failures, Gradients, Ranks, agreement, copies_of
from superoffload.integrations.deepspeed.zero.inner_optimizer import InnerOptimizer, SavedState, SubGroupState
from superoffload.integrations.deepspeed.zero.steps import Formulas, OurFormulas, Steps, StockFormulas, WindowEnd
from superoffload.integrations.deepspeed.zero.stock import Layout, Place, Stock, trained
from superoffload.links.base import Link
from superoffload.optimizer.arguments import check_rank_check, check_state_dtype
from superoffload.optimizer.lifetime import Lifetime

# ---- shards from DeepSpeed's flat buffers, and the state that they point into ---------------------------------------


def link_of_resident(layout: Layout) -> Link | None:
    """Makes the link that steps sub-groups on the accelerator; None if there are none there."""
    if not layout.resident:
        return None
    masters = {sub_group: layout.masters[sub_group] for sub_group in layout.resident}
    check_resident(masters, {i: layout.published(i) for i in layout.resident})
    return accelerator_link(masters[min(layout.resident)].device)


class Shards:
    """Makes a shard of the engine, and its state, for every parameter's partition on this rank."""

    def __init__(self, stock: Stock, layout: Layout, options: Options) -> None:
        self._stock = stock
        self._layout = layout
        self._options = options
        self.partitions: list[Partition] = []  # in the order of sub-groups, the same on all ranks
        self.states: list[SubGroupState] = []  # one per sub-group
        self._check_split_masters()
        for sub_group, params in enumerate(layout.groups):
            self._cut(sub_group, params)

    def _check_split_masters(self) -> None:
        """Refuses split masters where no parameter has them."""
        dtypes = {self._layout.published(i).dtype for i in range(len(self._layout.groups))}
        if self._options.master_dtype == "split" and torch.bfloat16 not in dtypes:
            raise ArgumentError(
                f"\"{OPTIONS_KEY}\": master_dtype='split': it needs bfloat16 parameters, and these are "
                f'{", ".join(sorted(map(str, dtypes)))}; set "bf16": {{"enabled": true}}, or "fp32"'
            )

    def _cut(self, sub_group: int, params: Sequence[Any]) -> None:
        places, gradients = self._layout.places(sub_group), self._layout.gradients(sub_group)
        state = self._make_state(sub_group, places)
        self.states.append(state)
        for member, (param, place) in enumerate(zip(params, places, strict=True)):
            shard = self._make_shard(param, sub_group, place, member)
            state.add(shard)
            padded = gradients[place.offset : place.offset + place.size]
            key = self._layout.key(param)
            self.partitions.append(Partition(key, sub_group, shard, padded[: place.numel], padded))

    def _make_state(self, sub_group: int, places: list[Place]) -> SubGroupState:
        flat = self._layout.masters[sub_group]
        is_bf16 = self._layout.published(sub_group).dtype == torch.bfloat16
        return SubGroupState(
            flat,
            places,
            moments=check_state_dtype(self._options.state_dtype),
            split=is_bf16 and self._options.master_dtype == "split",
            device=flat.device if sub_group in self._layout.resident else None,
        )

    def _make_shard(self, param: Any, sub_group: int, place: Place, member: int) -> Shard:
        layout, state = self._layout, self.states[sub_group]
        name = layout.name(param)
        shard = Shard(
            index=len(self.partitions),
            name=name,
            group=layout.param_group(sub_group),
            numel=place.numel,
            gradient_dtype=self._stock.gradient_accumulation_dtype,
            published_dtype=layout.published(sub_group).dtype,
            master=state.masters[member],
            exp_avg=state.moments["exp_avg"][member],
            exp_avg_sq=state.moments["exp_avg_sq"][member],
            target=lambda: layout.published(sub_group)[place.elements],
            noise_stream=noise_stream(self._options.seed, name),
            offset=place.start,
            resident=sub_group in layout.resident,
        )
        if state.split:
            shard.splits_master()
        return shard


# ---- the parts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Holds what an optimizer owns. Each part knows those before it."""

    layout: Layout
    driver: PartitionDriver
    inner: InnerOptimizer
    ranks: Ranks
    failures: Failures
    gradients: Gradients
    formulas: Formulas
    window_end: WindowEnd
    steps: Steps
    saved_state: SavedState
    on_demand: bool

    def abandon(self) -> None:
        """Abandons the window if there was no ``step()`` since backward."""
        self.gradients.abandon()

    def deliver(self, params: Sequence[Any]) -> None:
        """Delivers parameters before they are gathered."""
        with self.failures.kept():
            self.driver.deliver([self.layout.key(param) for param in params])

    def take_over(self, params: Sequence[Any]) -> None:
        """Makes the masters follow parameters that the user wrote."""
        self.ranks.forget_look()
        for param in params:
            self.driver.take_over(self.layout.key(param))

    def close(self) -> None:
        """Undoes what was speculated, delivers what was not delivered, ends the worker threads."""
        self.driver.close()

    def end_threads(self) -> None:
        """Ends the worker threads and leaves speculated state as it is."""
        self.driver.engine.pool.close()


class Closed:
    """Replaces the parts of an optimizer that was destroyed, or never finished."""

    def abandon(self) -> None: ...

    def deliver(self, params: Sequence[Any]) -> None: ...

    def take_over(self, params: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    def end_threads(self) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError("this optimizer was destroyed; make a new engine with deepspeed.initialize()")


def assemble(stock: Stock, layout: Layout, options: Options, *, boundary_is_told: bool) -> Parts:
    """Makes the parts for DeepSpeed's layout. Collective."""
    accelerator = link_of_resident(layout)
    shards = Shards(stock, layout, options)
    inner = InnerOptimizer(stock, layout, shards.states)
    published, group = [layout.published(i) for i in range(len(layout.groups))], layout.ranks
    cpus, crowded = cpus_of_this_rank(options.threads, published, group, options.rank_timeout)
    driver = PartitionDriver(
        shards.partitions,
        len(layout.groups),
        EngineOptions(options.speculation, options.bucket_numel, cpus),
        inner.hyper,
        writes_partitions=layout.written_in_place,
        accelerator=accelerator,
    )
    check = check_rank_check(options.rank_check)
    held = [
        layout.held(partition.sub_group, param, partition.shard)
        for param, partition in zip(trained(layout), shards.partitions, strict=True)
    ]
    session = open_session(held, layout.gathered, check, group, options.rank_timeout)
    ranks, failures = agreement(session, driver, inner.settings), Failures()
    gradients = Gradients(stock, layout, driver, copies_of(stock, driver), ranks, failures, boundary_is_told)
    formulas: Formulas = StockFormulas(stock, layout, driver) if options.match_stock else OurFormulas()
    window_end = WindowEnd(layout, driver, ranks, failures, formulas)
    on_demand = options.delivery == "on_demand"
    steps = Steps(stock, driver, inner, ranks, failures, on_demand and not crowded)
    saved_state = SavedState(layout, driver, inner, shards.states, ranks, gradients)
    return Parts(layout, driver, inner, ranks, failures, gradients, formulas, window_end, steps, saved_state, on_demand)


# ---- what DeepSpeed calls, in every stage ---------------------------------------------------------------------------


class Speculative:
    """Makes an optimizer of DeepSpeed's step during backward, on the CPU; each stage's class derives from it first."""

    superoffload_options: Options
    parts: Parts | Closed = Closed()  # also while DeepSpeed's constructor runs
    overflow: bool  # DeepSpeed's, as are the others
    optimizer: Any
    _global_grad_norm: Any

    def check_given(self, optimizer: Any, ds_config: Any, arguments: dict[str, Any]) -> bool:
        """Checks what DeepSpeed's constructor is given; tells whether DeepSpeed knows a window's last backward."""
        self._lifetime = Lifetime(self)
        check_environment()
        config = load(ds_config) or {}
        self.superoffload_options = read_options(config)
        check_optimizer(optimizer, DeepSpeedCPUAdam)
        check_arguments(arguments)
        return bool(config.get("managed_gradient_accumulation", True))

    def begin(self, stock: Any, layout: Layout, *, boundary_is_told: bool) -> None:
        """Takes over from DeepSpeed's constructor. ``stock``: a weak proxy of this object."""
        if stock.torch_autocast_gradscaler is not None:
            raise StateError("torch_autocast with fp16: its loss scaler is not supported; use bf16, or fp16 without it")
        self.parts = assemble(stock, layout, self.superoffload_options, boundary_is_told=boundary_is_told)
        self._lifetime.open()
        for param in trained(layout):
            param.superoffload_steps_it = True  # switch.py asks for it

    # ---- step() ---------------------------------------------------------------------------------------------------

    def check_step(self, closure: Any) -> None:
        """Refuses what ``step()`` would not obey."""
        if closure is not None:
            raise StateError("step(closure): closures are not supported, as in DeepSpeed; call engine.step()")
        self.parts.inner.refuse_hooks()

    def step_window(self, stock: Any) -> float:
        """Steps or skips, by one verdict for all sub-groups; returns the loss scale of the window."""
        parts = self.parts
        window, norm = parts.window_end.close()
        before = float(stock.loss_scale)
        self.overflow = not math.isfinite(float(norm))
        if self.overflow:
            parts.steps.skip(before)
            stock._update_scale(True)
            self._global_grad_norm = float("inf")
            return before
        stock._update_scale(False)
        scale = parts.formulas.scale(before)
        self._global_grad_norm = (norm / parts.formulas.scale_of_norm(before)).float()
        parts.steps.apply(window, norm, float(self._global_grad_norm), expected=before, scale=scale)
        return before

    # ---- saved state ----------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Returns once nothing runs: parameters, masters and moments are those of the last finished step."""
        self.parts.saved_state.synchronize()

    def state_digests(self) -> dict[str, str]:
        """Returns SHA-256 of this rank's masters, moments and published partitions, as after the last finished step."""
        return self.parts.saved_state.digests()

    def _restore_from_bit16_weights(self) -> None:
        stock: Any = super()
        self.synchronize()
        with self.parts.saved_state.writing_masters():
            stock._restore_from_bit16_weights()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Moves the last finished step's states; gradients are in host memory anyway."""
        stock: Any = super()
        self.synchronize()
        stock.offload_states(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Refuses iteration, which torch.distributed.checkpoint tries on other objects than torch.optim.Optimizer."""
        raise StateError("DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()")

    # ---- figures and the end --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Returns totals of this rank since construction (superoffload/engine/stats.py)."""
        return self.parts.driver.engine.stats()

    def close(self) -> None:
        """Undoes what was speculated and ends the worker threads; parameters and state stay readable."""
        parts, self.parts = self.parts, Closed()
        self._lifetime.close(parts, self.unwrap)

    def unwrap(self) -> None:
        """Restores functions that a stage has wrapped."""

    def __del__(self) -> None:
        """Ends the threads of an optimizer that was never destroyed: its speculated state has no reader any more."""
        self.parts.end_threads()

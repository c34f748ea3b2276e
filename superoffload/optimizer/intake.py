"""Gradients go from backward to the engine: one by one in the first step, later all of a bucket together.

A hook of the parameter, a framework's reduction, or ``step()`` hands them over.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superoffload.distributed.group import NO_INPUTS
from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.engine.inbox import PassedBuckets
from superoffload.errors import ArgumentError, StateError, SuperOffloadError
from superoffload.host.memory import room_on_device
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.accumulation import Accumulation
from superoffload.optimizer.arguments import check_gradient
from superoffload.optimizer.frameworks import await_gradient
from superoffload.optimizer.freed_gradients import FreedGradients
from superoffload.optimizer.gradient_source import (
    accept_main_grad,
    dtype_to_come,
    gradient_of,
    lay_out_like,
    main_grad_of,
)
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.params import Params
from superoffload.optimizer.placeholder import GradientPlaceholder, packed_in, unpacked
from superoffload.optimizer.settings import ClipSettings
from superoffload.optimizer.tracked_param import TrackedParam, ready_gradients


@dataclass(eq=False, repr=False)
class Intake:
    """Hands each gradient to the engine in a hook of the last backward before ``step()``, or in ``step()``."""

    _lifetime: Lifetime
    _engine: Engine
    _params: Params
    _accumulation: Accumulation
    _freed: FreedGradients
    _master_updates: MasterUpdates
    _ranks: Ranks
    _clipping: ClipSettings

    def __post_init__(self) -> None:
        self._host_accumulation = self._freed.host_accumulation
        self._asynchronous = self._engine.link.asynchronous
        self._in_place = self._engine.link.in_place  # gradients stay where they are until step() takes them
        self._hooks: dict[TrackedParam, RemovableHandle] = {}  # not of frozen parameters
        self._unhooked: list[TrackedParam] = []  # frozen ones, and those that are reduced over ranks later
        # The bucket of each shard that lies in one alone, by the shard's index. Empty, gradients go one by one: until
        # the engine has a gradient of this step, while its buckets may change, and in step().
        self._only_bucket: Mapping[int, Bucket] = {}
        self._waiting: defaultdict[Bucket, dict[TrackedParam, None]] = defaultdict(
            dict
        )  # until all of a bucket are final
        self._passed = PassedBuckets()
        # Whose hook has ended a backward: with which p.grad, in which thread, and why.
        self._unfinished: dict[TrackedParam, tuple[int, str, Exception]] = {}

    # ---- hooks ------------------------------------------------------------------------------------------------

    def adopt(self, group: int, params: Sequence[Tensor]) -> None:
        """Makes state for parameters that have none, and takes their gradients from now on."""
        self._unhooked += self._params.adopt(group, params)
        self.hook()

    def hook(self) -> None:
        """Hooks parameters that train and have no hook yet: new ones, and those that were frozen before."""
        still = []
        for tracked in self._unhooked:
            if tracked.param.requires_grad and not tracked.shard.reduced_later:
                self._hooks[tracked] = tracked.param.register_post_accumulate_grad_hook(_hook_of(self, tracked))
            else:
                still.append(tracked)
        self._unhooked = still

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ---- during backward --------------------------------------------------------------------------------------

    def take(self, tracked: TrackedParam) -> None:
        """Takes a gradient in its hook, after backward has added to it.

        [Note: why gradients wait for the last one of their bucket] Hooks hold up backward. So one that does not
        complete its bucket costs a look-up and a count, and the last one hands all to the engine, compared and packed
        together. They wait in ``p.grad``; ``backwards`` and ``_waiting`` are only a hint: an edit on the way is seen
        in the comparison, and after an interrupt between any two lines ``step()`` finds the gradient there.
        The first of a step, those of several buckets and second ones go alone, by ``_take_alone``.
        """
        if self._accumulation.contexts:
            if self._only_adds_up(tracked):
                return
        elif tracked.is_dtensor:
            lay_out_like(tracked.param)
        bucket, gradient = self._only_bucket.get(tracked.shard.index), tracked.gradient
        if self._in_place:
            self._in_backward(tracked, self._follow_last)
            return
        last = gradient.backwards + 1 >= gradient.expected
        if (
            bucket is None
            or gradient.handed is not None
            or gradient.reduced is not None
            or self._accumulation.contexts
            or "main_grad" in tracked.param.__dict__
            or not (last or self._host_accumulation.is_disabled)
        ):
            self._in_backward(tracked, self._take_alone)
            return
        gradient.backwards += 1
        if last:
            self._wait_for_bucket(tracked, bucket)

    def _wait_for_bucket(self, tracked: TrackedParam, bucket: Bucket) -> None:
        """Keeps a final gradient until all others of its bucket are there."""
        if self._asynchronous:
            self._engine.link.received(bucket)
        waiting = self._waiting[bucket]
        waiting[tracked] = None
        if len(waiting) == 1:
            passed = self._passed.begins(bucket, tuple(self._waiting))
            if passed:
                self._in_backward(tracked, lambda _: self._take_passed(passed))
        if len(waiting) >= (bucket.missing or len(bucket.pieces)):  # 0: not renewed since the last step
            self._in_backward(tracked, lambda _: self._take_bucket(bucket))

    def _only_adds_up(self, tracked: TrackedParam) -> bool:
        """Returns whether a gradient that more will be added to stays where it is, with nothing else to do."""
        has_gradient = self._engine.has_gradient(tracked.shard)
        return not has_gradient and not self._unfinished and self._host_accumulation.is_disabled

    def _follow_last(self, tracked: TrackedParam) -> None:
        """Leaves a gradient where it is; the master follows a written parameter now, as if the gradient were taken."""
        if self._count_backward(tracked) and tracked.plainly_written:
            self._master_updates.follow(tracked)

    def _take_bucket(self, bucket: Bucket) -> None:
        """Hands the waiting gradients of ``bucket`` to the engine together."""
        for tracked in self._pass_on(self._no_longer_waiting(bucket), in_backward=True):
            self._in_backward(tracked, self._take_counted)

    def _take_passed(self, buckets: Sequence[Bucket]) -> None:
        """Has the engine go on without the gradients that are missing: backward has passed these buckets."""
        for bucket in buckets:
            self._take_bucket(bucket)
            self._engine.pass_by(bucket)

    def _no_longer_waiting(self, bucket: Bucket) -> list[TrackedParam]:
        """Removes the waiting gradients in one operation. If another thread adds one later, ``step()`` finds it."""
        return list(self._waiting.pop(bucket, ()))

    def _pass_on(self, several: Sequence[TrackedParam], *, in_backward: bool) -> list[TrackedParam]:
        """Gives the engine all gradients that can be packed as they are; returns the others."""
        ready, others = ready_gradients(several, self._engine.inbox.arrived)
        if not ready:
            return others
        try:
            self._engine.arrive_together(ready, in_backward=in_backward)
        except BaseException:
            for tracked in several:  # they will be compared anew
                if not self._engine.has_gradient(tracked.shard):
                    tracked.gradient.forget()
            raise
        return others

    def take_missing(self, several: Sequence[TrackedParam]) -> None:
        """Hands over, in ``step()``, the gradients that the engine does not have."""
        for tracked in several[:1]:  # begins the step, if no gradient has arrived before
            self.hand_over(tracked, in_backward=False)
        for tracked in self._pass_on(several[1:], in_backward=False):
            self.hand_over(tracked, in_backward=False)

    def take_waiting(self) -> None:
        """Hands over waiting gradients, after backward, as their hooks would: those that can be packed as they are.
        ``take_missing()`` gets the others."""
        self._only_bucket = {}
        for bucket in list(self._waiting):
            self._pass_on(self._no_longer_waiting(bucket), in_backward=True)

    def follow_waiting(self) -> None:
        """Has masters follow written parameters whose gradients wait, before the state is read."""
        for waiting in list(self._waiting.values()):
            for tracked in list(waiting):
                if tracked.plainly_written:
                    self._master_updates.follow(tracked)

    def begin_anew(self) -> None:
        """The next gradient begins a step."""
        self._only_bucket = {}
        self._passed.end_step()
        self._waiting.clear()

    def _in_backward(self, tracked: TrackedParam, take: Callable[[TrackedParam], None]) -> None:
        """Calls ``take`` in one thread at a time. Its error may be lost with the thread that runs backward; ``step()``
        raises it again, since gradients are missing then."""
        self._lifetime.work.if_in_use(self._keep_error_of, take, tracked)

    def _keep_error_of(self, take: Callable[[TrackedParam], None], tracked: TrackedParam) -> None:
        try:
            take(tracked)
        except Exception as error:
            if not any(known is error for _, _, known in self._unfinished.values()):  # of one that waited
                grad = id(gradient_of(tracked.param))
                self._unfinished[tracked] = (grad, threading.current_thread().name, error)
            raise
        if self._unfinished:
            self._unfinished.pop(tracked, None)

    def _take_alone(self, tracked: TrackedParam) -> None:
        packed = packed_in(tracked.param.grad)
        if packed is not None and (packed.addend is None or not self._freed.is_packed(tracked, packed)):
            packed = None
        if packed is None and self._engine.has_gradient(tracked.shard):
            self.retract(tracked)  # a second backward before step(): the sum is the gradient
        more_to_come = not self._count_backward(tracked)
        if not self._engine.is_filling and self._params.are_regrouped:
            return  # step() takes it, by the groups that there are then
        if packed is not None:
            self._add_to_packed(tracked, packed, more_to_come=more_to_come)
        elif not more_to_come or self._host_accumulation.serve(tracked.param, tracked.shard):
            await_gradient(tracked.param)
            self.hand_over(tracked, in_backward=True, more_to_come=more_to_come)

    def _take_counted(self, tracked: TrackedParam) -> None:
        """Takes a gradient that was counted as the last one, unless it was removed since."""
        if tracked.param.grad is not None and main_grad_of(tracked.param) is None:
            if self._engine.has_gradient(tracked.shard):
                self.retract(tracked)
            await_gradient(tracked.param)
            self.hand_over(tracked, in_backward=True)

    def _count_backward(self, tracked: TrackedParam, *, in_hook: bool = True) -> bool:
        """Counts a backward; returns whether it is most likely the last one before ``step()``. ``in_hook``: in the hook
        of the parameter, which has the gradient by then."""
        accumulation = self._accumulation
        not_all = in_hook and not accumulation.is_asked_for and not accept_main_grad(tracked.param)
        if accumulation.is_asked_for or not_all or accumulation.is_of_a_window():
            return False
        tracked.gradient.backwards += 1
        return tracked.gradient.backwards >= tracked.gradient.expected

    def _add_to_packed(self, tracked: TrackedParam, packed: GradientPlaceholder, *, more_to_come: bool) -> None:
        assert packed.addend is not None
        if tracked.plainly_written:
            self._master_updates.follow(tracked)
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part_of_gradient(packed.addend)
        self._engine.add(tracked.shard, part, more_to_come=more_to_come)
        packed.take_addend()  # only now: if the addition fails, the addend stays part of the gradient

    # ---- to the engine ------------------------------------------------------------------------------------------

    def retract(self, tracked: TrackedParam) -> None:
        """Has the engine retract the gradient."""
        tracked.gradient.forget()
        self._engine.retract(tracked.shard)

    def give_back(self) -> None:
        """Leaves all gradients to ``p.grad``, to take them again in ``step()``: the groups have changed."""
        self._freed.making_way()
        for tracked in self._params:
            self.retract(tracked)
        self.begin_anew()

    def hand_over(self, tracked: TrackedParam, *, in_backward: bool, more_to_come: bool = False) -> None:
        """Gives the engine the gradient that the user sees."""
        main = main_grad_of(tracked.param)
        grad = unpacked(tracked.param) if main is None else main
        if grad is None:
            return  # an earlier hook, or another thread, has removed it
        check_gradient(tracked.shard.name, tracked.param, grad)
        self._accumulation.fp32.check(tracked.shard.name, tracked.param, grad)
        if tracked.plainly_written:  # for writes that versions do not show, step() undoes the speculation
            self._master_updates.follow(tracked)
        self._follow_dtype(tracked, grad.dtype)
        self._begin_filling(in_backward=in_backward)
        shard, engine = tracked.shard, self._engine
        tracked.gradient.forget_placeholder()
        # Fused kernels raise no version when they add. Comparing a DTensor that stays on a device with the packed
        # gradient in host memory would copy it down again. In both cases sums of bits are compared.
        kept_there = is_dtensor(grad) and engine.link.asynchronous and not engine.link.frees_gradients
        summed = main is not None or kept_there
        shard.gradient_stays(kept=main is not None, summed=summed and engine.link.sums_what_it_packs)
        tracked.gradient.remember(grad, summed=summed and not shard.sums_gradient)
        with room_on_device(shard.name):
            part = tracked.holding.part_of_gradient(grad).to(shard.gradient_dtype)
        engine.arrive(shard, part, in_backward=in_backward, more_to_come=more_to_come)

    def _begin_filling(self, *, in_backward: bool) -> None:
        if self._engine.is_filling:
            return
        self._ranks.look()
        self._engine.speculator.expect(unscale=self._clipping.unscale, max_grad_norm=self._clipping.max_grad_norm)
        self._only_bucket = self._engine.layout.only_bucket if in_backward and self._engine.layout.observed else {}

    def _follow_dtype(self, tracked: TrackedParam, dtype: torch.dtype) -> None:
        """Widens buckets so that the gradient fits: fp32 holds every other dtype exactly.

        Public dtypes are read again at the first gradient of a step. If a gradient is in fp32 against them, the others
        of its group are expected in fp32 too.
        """
        shard, engine = tracked.shard, self._engine
        fits = shard.gradient_dtype in (dtype, torch.float32)
        if fits and engine.is_filling:
            return
        unseen = [one for one in self._params if not (one.has_stepped or engine.has_gradient(one.shard))]
        wide = [one.shard for one in unseen if _comes_in_fp32(one) or (not fits and one.shard.group == shard.group)]
        engine.widen(wide)
        if shard.gradient_dtype not in (dtype, torch.float32):
            before = "as in the steps before" if tracked.has_stepped else "and other gradients of this step are packed"
            raise ArgumentError(
                f"{shard.name}: its gradient is {dtype}, and {shard.gradient_dtype} was expected, {before}; set "
                f"p.grad_dtype = {dtype}, or p.main_grad, before the optimizer is made. Where that changes between "
                "steps make a new optimizer and load the state_dict() of this one"
            )

    # ---- reduced over ranks -----------------------------------------------------------------------------------

    def take_reduced(self, param: Tensor, gradient: Tensor) -> None:
        """Takes the result of a reduction over ranks during backward; it becomes ``param.grad``."""
        tracked = self._params.get(param)
        if tracked is not None and not self._in_place:
            self._in_backward(tracked, lambda one: self._take_reduced(one, gradient))

    def confirm_reduced(self, param: Tensor) -> None:
        """Watches ``param.grad``, now that it has the reduced gradient: its version shows edits from here on."""
        tracked = self._params.get(param)
        if tracked is not None:
            self._in_backward(tracked, _watch_reduced)

    def _take_reduced(self, tracked: TrackedParam, gradient: Tensor) -> None:
        if self._engine.has_gradient(tracked.shard):
            self.retract(tracked)
        if not self._count_backward(tracked, in_hook=False):
            return
        if main_grad_of(tracked.param) is not None:  # the user adds the reduced gradient to it
            return
        if not self._engine.is_filling and self._params.are_regrouped:
            return
        if tracked.plainly_written:
            self._master_updates.follow(tracked)
        self._follow_dtype(tracked, gradient.dtype)
        self._begin_filling(in_backward=True)
        tracked.shard.gradient_stays(kept=False, summed=False)
        tracked.gradient.remember_reduced(gradient)
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part_of_memory(gradient.view(-1)).to(tracked.shard.gradient_dtype)
        self._engine.arrive(tracked.shard, part)

    def leave_join(self) -> None:
        """This rank has no more inputs and takes no step, and others do: none can that need all."""
        if self._ranks.session is not None and not self._lifetime.work.out_of_use():
            self._ranks.leave()
            raise StateError(NO_INPUTS.format(who="this rank"))

    # ---- in step() ------------------------------------------------------------------------------------------

    def check_finished(self) -> None:
        """Raises if a backward ended with an error, unless the user has removed or replaced its gradient since."""
        for tracked, (grad, thread, error) in self._unfinished.items():
            if gradient_of(tracked.param) is not None and id(gradient_of(tracked.param)) == grad:
                raise StateError(
                    f"step(): a backward() in thread {thread!r} was ended at {tracked.shard.name} by an error "
                    f"({type(error).__name__}: {error}), so gradients are missing. Nothing has changed; call "
                    "zero_grad() and run backward again"
                ) from error
        self._unfinished.clear()

    def forget(self) -> None:
        """Gives up the gradients of this step; masters follow the writes before it."""
        self._unfinished.clear()
        with suppress(SuperOffloadError):  # step() raises for a parameter that no longer fits
            self.follow_waiting()
        self.begin_anew()


def _hook_of(intake: Intake, tracked: TrackedParam) -> Callable[[Tensor], None]:
    """Makes the hook of a parameter. It keeps neither object alive, since parameters often outlive the optimizer."""
    intake_of, tracked_of = ref(intake), ref(tracked)

    def on_gradient(param: Tensor) -> None:
        alive, one = intake_of(), tracked_of()
        if alive is not None and one is not None:
            alive.take(one)

    return on_gradient


def _comes_in_fp32(tracked: TrackedParam) -> bool:
    return dtype_to_come(tracked.shard.name, tracked.param) is torch.float32


def _watch_reduced(tracked: TrackedParam) -> None:
    gradient = tracked.gradient
    if gradient.reduced is not None and tracked.param.grad is not None:
        gradient.forget_reduced()
        gradient.remember(tracked.param.grad)

"""Gradients go from backward to the core as soon as they are final."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superoffload.distributed.fully_shard import await_offload
from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.errors import ArgumentError, StateError, SuperOffloadError
from superoffload.host.memory import room_on_device
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.accumulating import Accumulation
from superoffload.optimizer.arguments import check_gradient
from superoffload.optimizer.as_left import ready_gradients
from superoffload.optimizer.fp32_sums import Fp32Sums
from superoffload.optimizer.freed_gradients import FreedGradients
from superoffload.optimizer.gradient_source import dtype_to_come, gradient_of, is_added, main_grad_of
from superoffload.optimizer.host_sums import HostSums
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.packed_gradient import PackedGradient, packed_in, unpacked
from superoffload.optimizer.params import Params
from superoffload.optimizer.verdicts import Verdicts
from superoffload.optimizer.watched import Tracked
from superoffload.optimizer.writes import Writes


class Intake:
    """Hands each gradient to the core in a hook of the last backward before ``step()``, or at the boundary."""

    def __init__(
        self,
        lifetime: Lifetime,
        core: Engine,
        params: Params,
        accumulation: Accumulation,
        sums: Fp32Sums,
        host_sums: HostSums,
        freed: FreedGradients,
        writes: Writes,
        ranks: Ranks,
        verdicts: Verdicts,
    ) -> None:
        self._lifetime = lifetime
        self._core = core
        self._params = params
        self._accumulation = accumulation
        self._sums = sums
        self._host_sums = host_sums
        self._freed = freed
        self._writes = writes
        self._ranks = ranks
        self._verdicts = verdicts
        self._in_streams = core.link.in_streams
        self._hooks: dict[Tracked, RemovableHandle] = {}  # not of frozen parameters
        self._unhooked: list[Tracked] = []  # frozen, or reduced over ranks
        self._steady = False  # the first gradient of this step has gone to the core, whose buckets stay as they are
        self._waiting: defaultdict[Bucket, dict[Tracked, None]] = defaultdict(dict)  # until all of a bucket are final
        self._arrivals: dict[Tracked, int] = {}  # backward passes that reached each since the last step
        self._expected: dict[Tracked, int] = {}  # as many as in the step before; one where none is known
        # Whose hook has ended a backward: with which p.grad, in which thread, and why.
        self._unfinished: dict[Tracked, tuple[int, str, Exception]] = {}

    # ---- hooks ------------------------------------------------------------------------------------------------

    def adopt(self, group: int, params: Sequence[Tensor]) -> None:
        """State for those that have none yet, and gradients of theirs from now on."""
        self._unhooked += self._params.adopt(group, params)
        self.hook()

    def hook(self) -> None:
        """Parameters that train and have no hook yet: those that are new, and those that were frozen before."""
        still = []
        for tracked in self._unhooked:
            if tracked.param.requires_grad and tracked.early:
                self._hooks[tracked] = tracked.param.register_post_accumulate_grad_hook(_hook_of(self, tracked))
            else:
                still.append(tracked)
        self._unhooked = still

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # ---- during backward --------------------------------------------------------------------------------------

    def take(self, tracked: Tracked) -> None:
        """Its hook runs: backward has added to its gradient.

        One that does not complete its bucket waits for the others of the bucket. What is counted here is a hint: an
        interrupt between any two lines leaves a gradient to ``step()``, which finds it in ``p.grad``.
        """
        bucket = self._core.layout.only_bucket.get(tracked.shard.index) if self._steady else None
        gradient = tracked.gradient
        if (
            bucket is None
            or gradient.handed is not None
            or gradient.reduced is not None
            or self._accumulation.contexts
            or "main_grad" in tracked.param.__dict__
        ):
            self._in_backward(tracked, self._take)
        elif self._arrives_last(tracked):
            if self._in_streams:
                self._core.link.received(bucket)
            waiting = self._waiting[bucket]
            waiting[tracked] = None
            if len(waiting) >= (bucket.missing or len(bucket.pieces)):  # 0: still that of the step before
                self._in_backward(tracked, lambda _: self._take_waiting(bucket))
        elif self._host_sums.are_off:
            self._arrives(tracked)
        else:
            self._in_backward(tracked, self._take)

    def _arrives(self, tracked: Tracked) -> bool:
        """One backward more has reached it: whether it is the last one, going by the step before."""
        self._arrivals[tracked] = arrivals = self._arrivals.get(tracked, 0) + 1
        return arrivals >= self._expected.get(tracked, 1)

    def _arrives_last(self, tracked: Tracked) -> bool:
        """``_arrives()``, where it is the last one; else nothing is counted."""
        arrivals = self._arrivals.get(tracked, 0) + 1
        if arrivals < self._expected.get(tracked, 1):
            return False
        self._arrivals[tracked] = arrivals
        return True

    def _take_waiting(self, bucket: Bucket) -> None:
        """Gradients of ``bucket`` that were counted go to the core together."""
        for tracked in self._pass_on(self._no_longer_waiting(bucket), in_backward=True):
            self._in_backward(tracked, self._take_last)

    def _no_longer_waiting(self, bucket: Bucket) -> list[Tracked]:
        """At once: another thread may still add one, which ``step()`` finds."""
        return list(self._waiting.pop(bucket, ()))

    def _pass_on(self, several: Sequence[Tracked], *, in_backward: bool) -> list[Tracked]:
        """Gives the core all gradients that can be packed as they are; the others are returned."""
        ready, others = ready_gradients(several, self._core.inbox.arrived)
        if not ready:
            return others
        try:
            self._core.arrive_together(ready, in_backward=in_backward)
        except BaseException:
            for tracked in several:  # to be looked at anew
                if not self._core.has_gradient(tracked.shard):
                    tracked.gradient.forget()
            raise
        return others

    def take_late(self, several: Sequence[Tracked]) -> None:
        """Gradients that the core has not, at the boundary."""
        for tracked in several[:1]:  # begins the step, where none has come before
            self.hand_over(tracked, in_backward=False)
        for tracked in self._pass_on(several[1:], in_backward=False):
            self.hand_over(tracked, in_backward=False)

    def take_rest(self) -> None:
        """Backward is over: gradients of buckets that were not completed. What cannot be packed as it is stays."""
        self._steady = False
        for bucket in list(self._waiting):
            self._pass_on(self._no_longer_waiting(bucket), in_backward=True)

    def follow_waiting(self) -> None:
        """Before the state is looked at: masters have followed every parameter whose gradient is there."""
        for waiting in list(self._waiting.values()):
            for tracked in list(waiting):
                if tracked.plainly_written:
                    self._writes.follow(tracked)

    def end_step(self) -> None:
        """The next gradient begins a step, which is like this one was."""
        self._expected, self._arrivals = self._arrivals, {}
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steady = False
        self._waiting.clear()

    def _in_backward(self, tracked: Tracked, take: Callable[[Tracked], None]) -> None:
        """One thread at a time, whichever of them runs backward. What it raises may be lost with its thread, but then
        the gradients are not whole, so ``step()`` raises it again."""
        self._lifetime.work.if_in_use(self._take_by, take, tracked)

    def _take_by(self, take: Callable[[Tracked], None], tracked: Tracked) -> None:
        try:
            take(tracked)
        except Exception as error:
            if not any(known is error for _, _, known in self._unfinished.values()):  # of one that waited
                grad = id(gradient_of(tracked.param))
                self._unfinished[tracked] = (grad, threading.current_thread().name, error)
            raise
        if self._unfinished:
            self._unfinished.pop(tracked, None)

    def _take(self, tracked: Tracked) -> None:
        packed = packed_in(tracked.param.grad)
        if packed is not None and (packed.addend is None or not self._freed.is_packed(tracked, packed)):
            packed = None
        if packed is None and self._core.has_gradient(tracked.shard):
            self.let_go(tracked)  # a second backward before step(): undo, the sum is the gradient
        more_to_come = not self._is_last(tracked)
        if packed is not None:
            self._add_to_packed(tracked, packed, more_to_come=more_to_come)
        elif not more_to_come or self._host_sums.serve(tracked):
            await_offload(tracked.param)
            self.hand_over(tracked, in_backward=True, more_to_come=more_to_come)

    def _take_last(self, tracked: Tracked) -> None:
        """``_take`` for a gradient that was counted as the last one, unless it was taken away since."""
        if tracked.param.grad is not None and main_grad_of(tracked.param) is None:
            if self._core.has_gradient(tracked.shard):
                self.let_go(tracked)
            await_offload(tracked.param)
            self.hand_over(tracked, in_backward=True)

    def _is_last(self, tracked: Tracked) -> bool:
        """In its hook: whether this backward is the one before ``step()``, as far as it is known."""
        accumulation = self._accumulation
        if accumulation.is_asked_for or not _is_final(tracked.param) or accumulation.is_of_a_window():
            return False
        return self._arrives(tracked)

    def _add_to_packed(self, tracked: Tracked, packed: PackedGradient, *, more_to_come: bool) -> None:
        assert packed.addend is not None
        if tracked.plainly_written:
            self._writes.follow(tracked)
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part(packed.addend).contiguous()
        self._core.add(tracked.shard, part, more_to_come=more_to_come)
        packed.take_addend()  # not before: where that failed, it is part of the gradient all the same

    # ---- to the core ------------------------------------------------------------------------------------------

    def let_go(self, tracked: Tracked) -> None:
        """The core takes its gradient back."""
        tracked.gradient.forget()
        self._core.retract(tracked.shard)

    def hand_over(self, tracked: Tracked, *, in_backward: bool, more_to_come: bool = False) -> None:
        """The gradient that the user sees."""
        main = main_grad_of(tracked.param)
        grad = unpacked(tracked.param) if main is None else main
        assert grad is not None
        check_gradient(tracked.shard.name, tracked.param, grad)
        self._sums.check(tracked.shard.name, tracked.param, grad)
        if tracked.plainly_written:  # of other writes step() takes back what is speculated now
            self._writes.follow(tracked)
        self._follow_dtype(tracked, grad.dtype)
        self._begin_filling(in_backward=in_backward)
        shard, core = tracked.shard, self._core
        kept = main is not None
        tracked.gradient.forget_placeholder()
        # Fused kernels raise no version of what they add to. A DTensor that is kept on a device: the core has it in
        # host memory, and comparing there would copy it down again.
        kept_there = is_dtensor(grad) and core.link.asynchronous and not core.link.frees_gradients
        summed = kept or kept_there
        shard.gradient_stays(kept=kept, summed=summed and core.link.sums_what_it_packs)
        tracked.gradient.remember(grad, summed=summed and not shard.sums_gradient)
        with room_on_device(shard.name):
            part = tracked.holding.part(grad).contiguous().to(shard.gradient_dtype)
        core.arrive(shard, part, in_backward=in_backward, more_to_come=more_to_come)

    def _begin_filling(self, *, in_backward: bool) -> None:
        if self._core.is_filling:
            return
        self._ranks.look()
        self._core.speculator.expect(unscale=self._verdicts.unscale, max_grad_norm=self._verdicts.max_grad_norm)
        self._steady = in_backward and self._core.layout.observed

    def _follow_dtype(self, tracked: Tracked, dtype: torch.dtype) -> None:
        """Sees to it that the gradient fits its buckets: those in fp32 hold every other one exactly.

        What is public is read again at the first gradient of a step. One that comes in fp32 all the same is taken for
        the first of its group.
        """
        shard, core = tracked.shard, self._core
        fits = shard.gradient_dtype in (dtype, torch.float32)
        if fits and core.is_filling:
            return
        unseen = [one for one in self._params if not (one.has_stepped or core.has_gradient(one.shard))]
        wide = [one.shard for one in unseen if _comes_in_fp32(one) or (not fits and one.shard.group == shard.group)]
        core.widen(wide)
        if shard.gradient_dtype not in (dtype, torch.float32):
            before = "as in the steps before" if tracked.has_stepped else "and other gradients of this step are packed"
            raise ArgumentError(
                f"{shard.name}: its gradient is {dtype}, and {shard.gradient_dtype} was expected, {before}; set "
                f"p.grad_dtype = {dtype}, or p.main_grad, before the optimizer is made. Where that changes between "
                "steps make a new optimizer and load the state_dict() of this one"
            )

    # ---- reduced over ranks -----------------------------------------------------------------------------------

    def take_reduced(self, param: Tensor, gradient: Tensor) -> None:
        """A reduction over ranks has ended during backward; what it gave becomes ``param.grad``."""
        tracked = self._params.get(param)
        if tracked is not None:
            self._in_backward(tracked, lambda one: self._take_reduced(one, gradient))

    def keep_reduced(self, param: Tensor) -> None:
        """``param.grad`` has what the reduction gave; from here on its version counter shows what is done to it."""
        tracked = self._params.get(param)
        if tracked is not None:
            self._in_backward(tracked, _keep_reduced)

    def _take_reduced(self, tracked: Tracked, gradient: Tensor) -> None:
        if self._core.has_gradient(tracked.shard):
            self.let_go(tracked)
        if main_grad_of(tracked.param) is not None:  # which this is still to be added to
            return
        if tracked.plainly_written:
            self._writes.follow(tracked)
        self._follow_dtype(tracked, gradient.dtype)
        self._begin_filling(in_backward=True)
        tracked.shard.gradient_stays(kept=False, summed=False)
        tracked.gradient.remember_reduced(gradient)
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part_of_memory(gradient.view(-1)).to(tracked.shard.gradient_dtype)
        self._core.arrive(tracked.shard, part)

    # ---- at the boundary --------------------------------------------------------------------------------------

    def check_finished(self) -> None:
        """A gradient that was taken away or replaced since then is the user's answer to the error."""
        for tracked, (grad, thread, error) in self._unfinished.items():
            if gradient_of(tracked.param) is not None and id(gradient_of(tracked.param)) == grad:
                raise StateError(
                    f"step(): a backward() in thread {thread!r} was ended at {tracked.shard.name} by an error "
                    f"({type(error).__name__}: {error}), so gradients are missing. Nothing has changed; call "
                    "zero_grad() and run backward again"
                ) from error
        self._unfinished.clear()

    def forget(self) -> None:
        """What this step's backward has left is given up; masters follow what was written before it."""
        self._unfinished.clear()
        with suppress(SuperOffloadError):  # of a parameter that does not fit any more: step() says so
            self.follow_waiting()
        self._arrivals.clear()
        self._begin_anew()


def _hook_of(intake: Intake, tracked: Tracked) -> Callable[[Tensor], None]:
    """The parameter it hangs on, which often outlives the optimizer, keeps neither of them alive."""
    intake_of, tracked_of = ref(intake), ref(tracked)

    def on_gradient(param: Tensor) -> None:
        alive, one = intake_of(), tracked_of()
        if alive is not None and one is not None:
            alive.take(one)

    return on_gradient


def _comes_in_fp32(tracked: Tracked) -> bool:
    return dtype_to_come(tracked.shard.name, tracked.param) is torch.float32


def _is_final(param: Tensor) -> bool:
    """In a hook of ``param``. ``p.main_grad`` where nothing is left to be added to it: by a fused kernel, or by a hook
    that ran before ours. ``p.grad`` unless another hook has taken it away."""
    if main_grad_of(param) is None:
        return param.grad is not None
    final = is_added(param)
    if final:
        param.grad = None  # a stand-in, to which the next backward would add another one
    return final


def _keep_reduced(tracked: Tracked) -> None:
    gradient = tracked.gradient
    if gradient.reduced is not None and tracked.param.grad is not None:
        gradient.forget_reduced()
        gradient.remember(tracked.param.grad)

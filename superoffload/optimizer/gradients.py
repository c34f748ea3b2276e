"""Following gradients: from the hooks of backward to the core, and whatever users do to gradients and parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from superoffload.arguments import check_gradient
from superoffload.bucket import Shard
from superoffload.errors import ArgumentError, DeviceError, StateError
from superoffload.gradient_source import check_one_gradient, dtype_to_come, gradient_of, is_added, main_grad_of
from superoffload.integrations.accelerate import Window
from superoffload.integrations.fsdp2 import await_offload
from superoffload.memory import room_on_device
from superoffload.optimizer.accumulating import Accumulating
from superoffload.optimizer.advice import Advice
from superoffload.optimizer.edited_gradients import EditedGradients
from superoffload.optimizer.freed_gradients import FreedGradients
from superoffload.optimizer.host_sums import HostSums
from superoffload.optimizer.idle_steps import IdleSteps
from superoffload.optimizer.parameters import Parameters
from superoffload.optimizer.untold_writes import UntoldWrites
from superoffload.optimizer.weakly import weakly
from superoffload.packed_gradient import PackedGradient, packed_in, unpacked
from superoffload.ranks.layout import Holding, is_dtensor, version_of
from superoffload.tracked import Noticed, Tracked, notice, remember_values

if TYPE_CHECKING:
    from superoffload.integrations.ddp import ReducedGradients


class Gradients(Parameters):
    """Keeps the core's view of gradients and parameters that of the user."""

    _max_grad_norm: float | None
    _unscale = 1.0  # of the last step; speculation expects it again
    _reduced: ReducedGradients | None = None

    def _begin(self) -> None:
        super()._begin()
        self._accumulating: list[Accumulating] = []  # the contexts that are open, in any thread
        self._window = Window()
        # Whose hook has ended a backward: with which p.grad, in which thread, and why.
        self._unfinished: dict[Tracked, tuple[int, str, Exception]] = {}

    def _connect(self, params: Sequence[Tensor]) -> None:
        super()._connect(params)
        self._advice = Advice()
        self._edits = EditedGradients(self._advice)
        self._idle = IdleSteps(self._advice)
        self._untold = UntoldWrites(self._advice)
        self._freed = FreedGradients(self._core, self._advice)
        self._fetch, self._offer = weakly(self._bring_back), weakly(self._take_addend)
        self._host_sums = HostSums(self._core, wanted=self._given.fp32_sums)

    # ---- hooks ------------------------------------------------------------------------------------------------

    def _track(self, param: Tensor, shard: Shard, holding: Holding) -> Tracked:
        tracked = super()._track(param, shard, holding)
        self._hook(tracked)
        return tracked

    def _hook(self, tracked: Tracked) -> None:
        if tracked.hook is None and tracked.param.requires_grad and tracked.early:
            tracked.hook = tracked.param.register_post_accumulate_grad_hook(weakly(self._on_gradient))

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        for tracked in self._tracked.values():
            if tracked.hook is not None:
                tracked.hook.remove()

    # ---- during backward --------------------------------------------------------------------------------------

    def accumulate(self) -> Accumulating:
        """Backward inside this context is not the boundary: gradients add up and nothing is stepped yet."""
        return Accumulating(self._accumulating)

    def _on_gradient(self, param: Tensor) -> None:
        self._in_backward(param, self._take_gradient)

    def _in_backward(self, param: Tensor, take: Callable[[Tracked], None]) -> None:
        """One thread at a time, whichever of them runs backward. What it raises may be lost with its thread, but then
        the gradients are not whole, so ``step()`` raises it again."""
        tracked = self._tracked.get(param)
        if tracked is None or self._out_of_use():
            return
        with self._whole():
            if self._out_of_use():  # since another thread had the lock
                return
            try:
                take(tracked)
            except Exception as error:
                self._unfinished[tracked] = (id(gradient_of(tracked.param)), threading.current_thread().name, error)
                raise
            self._unfinished.pop(tracked, None)

    def _check_finished(self) -> None:
        """A gradient that was taken away or replaced since then is the user's answer to the error."""
        for tracked, (grad, thread, error) in self._unfinished.items():
            if gradient_of(tracked.param) is not None and id(gradient_of(tracked.param)) == grad:
                raise StateError(
                    f"step(): a backward() in thread {thread!r} was ended at {tracked.shard.name} by an error "
                    f"({type(error).__name__}: {error}), so gradients are missing. Nothing has changed; call "
                    "zero_grad() and run backward again"
                ) from error
        self._unfinished.clear()

    def _take_gradient(self, tracked: Tracked) -> None:
        packed = packed_in(tracked.param.grad)
        if packed is not None and (packed.addend is None or not self._is_packed(tracked, packed)):
            packed = None
        if packed is None and self._core.has_gradient(tracked.shard):
            self._let_go(tracked)  # a second backward before step(): undo, the sum is the gradient
        more_to_come = not self._is_last(tracked)
        if packed is not None:
            self._add_to_packed(tracked, packed, more_to_come=more_to_come)
        elif not more_to_come or self._host_sums.serve(tracked):
            await_offload(tracked.param)
            self._hand_over(tracked, in_backward=True, more_to_come=more_to_come)

    def _is_last(self, tracked: Tracked) -> bool:
        """In its hook: whether this backward is the one before ``step()``, as far as it is known."""
        if self._accumulating or not _is_final(tracked.param) or self._window.more_to_come():
            return False
        tracked.arrivals += 1
        return tracked.arrivals >= tracked.expected

    def _is_packed(self, tracked: Tracked, packed: PackedGradient) -> bool:
        """Whether ``packed`` stands for what the core has of this step."""
        return tracked.grad is packed and tracked.packed is packed and self._core.has_gradient(tracked.shard)

    def _take_addend(self, packed: PackedGradient, addend: Tensor) -> None:
        """Whichever thread adds it; its hook goes on with it."""
        with self._work.alone:
            tracked = self._of_shard.get(packed.shard)
            if tracked is None or self._out_of_use() or not self._is_packed(tracked, packed):
                return
            if packed.addend is None and packed.in_memory is None and self._host_sums.serve(tracked):
                packed.addend = addend

    def _add_to_packed(self, tracked: Tracked, packed: PackedGradient, *, more_to_come: bool) -> None:
        assert packed.addend is not None
        if tracked.plainly_written:
            self._refresh(tracked)
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part(packed.addend).contiguous()
        self._core.add(tracked.shard, part, more_to_come=more_to_come)
        packed.addend = None  # not before: where that failed, it is part of the gradient all the same

    def _hand_over(self, tracked: Tracked, *, in_backward: bool, more_to_come: bool = False) -> None:
        main = main_grad_of(tracked.param)
        grad = unpacked(tracked.param) if main is None else main
        assert grad is not None
        check_gradient(tracked.shard.name, tracked.param, grad)
        self._sums.check(tracked.shard.name, tracked.param, grad)
        if tracked.plainly_written:  # of other writes step() takes back what is speculated now
            self._refresh(tracked)
        self._follow_dtype(tracked, grad.dtype)
        if not self._core.is_filling:
            self._start_filling()
        shard, core = tracked.shard, self._core
        shard.keeps_gradient = main is not None
        tracked.forget_packed()
        # Fused kernels raise no version of what they add to. A DTensor that is kept on a device: the core has it in
        # host memory, and comparing there would copy it down again.
        kept_there = is_dtensor(grad) and core.link.asynchronous and not core.link.frees_gradients
        summed = shard.keeps_gradient or kept_there
        shard.sums_gradient = summed and core.link.sums_what_it_packs
        tracked.remember_grad(grad, summed=summed and not shard.sums_gradient)
        with room_on_device(shard.name):
            part = tracked.holding.part(grad).contiguous().to(shard.gradient_dtype)
        core.arrive(shard, part, in_backward=in_backward, more_to_come=more_to_come)

    def _follow_dtype(self, tracked: Tracked, dtype: torch.dtype) -> None:
        """Sees to it that the gradient fits its buckets: those in fp32 hold every other one exactly.

        What is public is read again at the first gradient of a step. One that comes in fp32 all the same is taken for
        the first of its group.
        """
        shard, core = tracked.shard, self._core
        fits = shard.gradient_dtype in (dtype, torch.float32)
        if fits and core.is_filling:
            return
        unseen = [one for one in self._tracked.values() if not (one.has_stepped or core.has_gradient(one.shard))]
        wide = [one.shard for one in unseen if _comes_in_fp32(one) or (not fits and one.shard.group == shard.group)]
        core.widen(wide)
        if shard.gradient_dtype not in (dtype, torch.float32):
            before = "as in the steps before" if tracked.has_stepped else "and other gradients of this step are packed"
            raise ArgumentError(
                f"{shard.name}: its gradient is {dtype}, and {shard.gradient_dtype} was expected, {before}; set "
                f"p.grad_dtype = {dtype}, or p.main_grad, before the optimizer is made. Where that changes between "
                "steps make a new optimizer and load the state_dict() of this one"
            )

    def _start_filling(self) -> None:
        """The first gradient of a step is here."""
        self._core.expect(unscale=self._unscale, max_grad_norm=self._max_grad_norm)

    def _on_packed(self, shard: Shard) -> None:
        """Nobody needs the gradient again: its memory goes, and something that says so stands in its place."""
        tracked = self._of_shard[shard.index]
        if tracked.grad is None or shard.keeps_gradient:  # not ours to free: a reduction's, or p.main_grad
            return
        tracked.free_grad(self._fetch, self._offer)

    def _bring_back(self, packed: PackedGradient) -> None:
        """Whichever thread needs it. Leaves ``packed`` as it is where what it stands for is not there any more."""
        self._check_process()
        with self._work.alone:
            tracked = self._of_shard.get(packed.shard)
            current = tracked is not None and tracked.packed is packed and not self._out_of_use()
            if tracked is not None and current and packed.in_memory is None:
                self._freed.bring_back(tracked, packed)

    def _keep_what_is_shown(self) -> None:
        """Buckets are about to be laid out again: gradients of the step before that were not let go are copied."""
        for tracked in self._tracked.values():
            packed, shown = tracked.packed, packed_in(tracked.param.grad)
            if packed is not None and packed is shown and not packed.zeroed:
                packed.bring_back()
        for tracked in self._tracked.values():
            tracked.forget_packed()

    def _on_reduced(self, param: Tensor, gradient: Tensor) -> None:
        """A reduction over ranks has ended during backward; what it gave becomes ``param.grad``."""
        self._in_backward(param, lambda tracked: self._take_reduced(tracked, gradient))

    def _take_reduced(self, tracked: Tracked, gradient: Tensor) -> None:
        if self._core.has_gradient(tracked.shard):
            self._let_go(tracked)
        if main_grad_of(tracked.param) is not None:  # which this is still to be added to
            return
        if tracked.plainly_written:
            self._refresh(tracked)
        self._follow_dtype(tracked, gradient.dtype)
        if not self._core.is_filling:
            self._start_filling()
        tracked.shard.keeps_gradient = tracked.shard.sums_gradient = False
        tracked.reduced = gradient
        with room_on_device(tracked.shard.name):
            part = tracked.holding.part_of_memory(gradient.view(-1)).to(tracked.shard.gradient_dtype)
        self._core.arrive(tracked.shard, part)

    def _on_kept(self, param: Tensor) -> None:
        """``param.grad`` has what the reduction gave; from here on its version counter shows what is done to it."""
        self._in_backward(param, self._keep_reduced)

    def _keep_reduced(self, tracked: Tracked) -> None:
        if tracked.reduced is not None and tracked.param.grad is not None:
            tracked.reduced = None
            tracked.remember_grad(tracked.param.grad)

    def _refresh(self, tracked: Tracked) -> None:
        tracked.check_still_fits()
        self._core.restore(tracked.shard)  # or an undo would put back the old master
        self._core.protect([tracked.shard])
        tracked.refresh_master()

    def _refresh_written(self, noticed: Noticed) -> None:
        self._untold.found(noticed.untold)
        for tracked in noticed.written:
            self._refresh(tracked)

    # ---- at the boundary --------------------------------------------------------------------------------------

    def _let_go(self, tracked: Tracked) -> None:
        tracked.grad = None
        self._core.retract(tracked.shard)

    def _let_go_of_edited(self, tracked: Tracked) -> None:
        if gradient_of(tracked.param) is not None:
            self._edits.edited(tracked.shard)
        self._let_go(tracked)

    def _collect(self) -> None:
        """Makes the core's view of gradients and parameters that of the user, whatever happened since backward."""
        core = self._core
        self._window.step_begins(self._advice)
        noticed = self._notice()
        self._untold.found(noticed.untold)
        for tracked in self._tracked.values():
            self._hook(tracked)  # frozen before, trains now
            if tracked.reduced is not None:
                self._adopt_reduced(tracked)
            if core.has_gradient(tracked.shard) and (tracked in noticed.edited or self._is_edited(tracked)):
                self._let_go_of_edited(tracked)
            if tracked in noticed.written:
                self._refresh(tracked)
            check_one_gradient(tracked.shard.name, tracked.param)
            if gradient_of(tracked.param) is not None and not core.has_gradient(tracked.shard):
                self._hand_over(tracked, in_backward=False)

    def _notice(self) -> Noticed:
        """What was written and edited. Where a device cannot tell: masters are those of the last finished step, and
        gradients that it has lost are an error of their own."""
        try:
            return notice(self._tracked.values(), self._core.packed_sums)
        except DeviceError:
            self._core.quiesce()
            raise

    def _is_edited(self, tracked: Tracked) -> bool:
        """Whether the gradient is no longer what the core has.

        Operations on lists of DTensors (torch._foreach_mul_, and so clip_grad_norm_) raise nobody's version, so there
        the bits are compared, unless ``notice`` has done that.
        """
        grad = gradient_of(tracked.param)
        if grad is None or tracked.grad_changed:
            return True
        packed = packed_in(grad)
        if packed is None:
            unseen = is_dtensor(grad) and tracked.grad_sums is None
            unknown = self._core.packed_sums(tracked.shard) is None if tracked.shard.sums_gradient else unseen
        else:  # brought back, and written with the same sums: a clip that clips nothing, or elements that were swapped
            unknown = packed.in_memory is not None and version_of(grad) != tracked.grad_version
        return unknown and not self._core.gradient_is(tracked.shard, tracked.holding.part(grad))

    def _adopt_reduced(self, tracked: Tracked) -> None:
        """From a reduction to what the user sees: the same bits, or somebody has edited ``p.grad`` since."""
        tracked.reduced = None
        grad = tracked.param.grad
        if grad is not None and self._core.has_gradient(tracked.shard):
            if self._core.gradient_is(tracked.shard, tracked.holding.part(grad)):
                tracked.remember_grad(grad)
            else:
                self._let_go_of_edited(tracked)

    def _after_step(self) -> None:
        moved, ours = [], []
        landing = self._core.landing_shards()
        for tracked in self._tracked.values():
            tracked.grad = tracked.reduced = None
            tracked.expected = max(1, tracked.arrivals)
            tracked.arrivals = 0
            if tracked.shard.index in landing:
                tracked.outdate()
            else:
                ours.append(tracked)
            if tracked.shown_steps != tracked.shard.steps:
                tracked.shown_steps = tracked.shard.steps
                tracked.has_stepped = True
                moved.append(tracked.step)
        self._untold.step_ended()
        remember_values(ours, on_device=self._untold.on_device)
        if moved:
            torch._foreach_add_(moved, 1.0)

    def _abandon(self) -> None:
        self._unfinished.clear()
        if self._reduced is not None:
            self._reduced.forget()
        for tracked in self._tracked.values():
            tracked.grad = tracked.reduced = None
            tracked.arrivals = 0
        self._core.abandon()


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

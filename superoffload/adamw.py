"""``superoffload.AdamW``: a ``torch.optim.Optimizer`` whose state is in host memory and steps during backward."""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload import kernels  # obeys SUPEROFFLOAD_ISA
from superoffload.arguments import (
    as_float,
    as_groups,
    check_finite,
    check_gradient,
    check_group,
    check_groups,
    check_max_grad_norm,
    check_parameter,
    check_rank_check,
    check_replicated,
    check_seed,
    check_state_dtype,
    check_whole_number,
    refuse_unknown,
)
from superoffload.bucket import ALIGN, GroupHyper, Shard
from superoffload.checkpoint import StateDict, read_state, write_state
from superoffload.core import Core, CoreOptions
from superoffload.cpus import worker_cpus
from superoffload.errors import ArgumentError, RankError, StateError, SuperOffloadError, WorkerError
from superoffload.interrupts import held_signals
from superoffload.links import link_for
from superoffload.masters import read_masters
from superoffload.memory import host_zeros
from superoffload.ranks.held import Held
from superoffload.ranks.layout import Holding, is_dtensor, like_parameter
from superoffload.ranks.setup import qualified_names, set_up_ranks
from superoffload.ranks.spread import Spread, gather
from superoffload.timeline import Timeline, record
from superoffload.tracked import Tracked
from superoffload.verdict import Verdict

if TYPE_CHECKING:
    from superoffload.checkpoints.snapshot import Snapshot
    from superoffload.integrations.ddp import ReducedGradients
    from superoffload.ranks.session import RankSession

__all__ = ["AdamW", "kernels"]

_OPEN: weakref.WeakSet[AdamW] = weakref.WeakSet()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _untraced(function: _Function) -> _Function:
    """torch.compile goes round it, as round the bookkeeping of torch's own optimizers."""
    untraced: _Function = getattr(torch, "_disable_dynamo", lambda same: same)(function)
    return untraced


@atexit.register
def _close_all() -> None:
    for optimizer in list(_OPEN):
        optimizer.close()


@dataclass(frozen=True)
class _Given:
    """Arguments that are needed again where an optimizer starts anew on other parameters."""

    speculation: str
    bucket_numel: int | None
    threads: int | None
    replicated: str
    check: tuple[bool, int]
    process_group: Any
    rank_timeout: float | None
    model: weakref.ReferenceType[nn.Module] | None


class AdamW(Optimizer):
    """AdamW with offloaded state, speculation and exact clipping.

    The arithmetic is that of ``torch.optim.AdamW`` in fp32 (Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019), with fp32 masters; docs/kernel.md has it operation by operation.

    Arguments:
        params: parameters or param groups: float32, bfloat16 or float16, dense, contiguous, on the CPU.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; per group, changeable at any time.
        max_grad_norm: clip the global gradient norm to this (None: no clipping). Changeable between steps. Replaces
            ``torch.nn.utils.clip_grad_norm_``.
        speculation: "adaptive" (speculate while clips are rare), "always" or "never". Never changes a result.
        delivery: "eager".
        keep_grads: gradients stay in ``p.grad`` after they were packed; True on the CPU.
        placement: None.
        bucket_numel: elements per bucket (None: a 32nd of the parameters, within 64 Ki and 32 Mi).
        threads: worker threads (None: one per core this process may use, shared with other ranks on the node).
        rank_check: "off", "light" (every step, one exchange of at most 128 bytes), "full" (every step, everything) or
            {"full": N}: light, and everything every N steps. Unless it is "off", everything is checked in the first
            three steps and after a load. docs/ranks.md. No effect in a single process.
        trace: write a timeline of every step to this file (docs/timeline.md); None: none is recorded.
        model: whose parameters these are: gives errors their qualified names, and lets a full check see what forward
            gathers (``fully_shard``); a ``DistributedDataParallel`` gets our communication hook, without which its
            gradients cannot be stepped during backward.
        replicated: what several ranks do about plain parameters, which each has in full: "replicate" the state,
            "shard" it over the ranks (each steps its part and gets the others'), or "local": this process is alone
            with them. None: "replicate".
        process_group: the ranks that share a verdict (None: all). We exchange over a gloo group of our own.
        rank_timeout: seconds to wait for other ranks (None: SUPEROFFLOAD_RANK_TIMEOUT, else 60).
        state_dtype: of exp_avg and exp_avg_sq: "fp32", or "bf16" with stochastic rounding: 20 instead of 28 bytes moved
            and 8 instead of 12 kept per parameter. docs/kernel.md shows what it costs in accuracy.
        seed: of that rounding; the same seed gives the same bits, whatever was speculated, undone or replayed.

    A step whose gradients contain a NaN or an infinity is skipped and counted, as loss scalers do. A parameter
    without a gradient is left alone, as in torch. ``torch.amp.GradScaler`` works, with or without its ``unscale_``.

    Writes to parameters and gradients are noticed by their version counters. Those that go through ``.data`` leave
    no trace there: call ``refresh_masters()`` after such a write to a parameter, and edit ``p.grad`` itself.

    Raises ArgumentError (a ValueError) for bad arguments before anything is changed.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        speculation: str = "adaptive",
        delivery: str = "eager",
        keep_grads: bool | None = None,
        placement: Any = None,
        bucket_numel: int | None = None,
        threads: int | None = None,
        rank_check: str | Mapping[str, int] = "light",
        trace: Any = None,
        model: nn.Module | None = None,
        replicated: str | None = None,
        process_group: Any = None,
        rank_timeout: float | None = None,
        state_dtype: str | torch.dtype = "fp32",
        seed: int = 0,
    ) -> None:
        self._max_grad_norm = check_max_grad_norm(max_grad_norm)
        refuse_unknown(delivery, placement)
        if keep_grads is False:
            raise ArgumentError("keep_grads=False: gradients on the CPU are always kept; pass True or None")
        check_whole_number("bucket_numel", bucket_numel)
        check = check_rank_check(rank_check)
        replicated = check_replicated(replicated)
        check_whole_number("threads", threads)
        groups = as_groups(params)
        if not any(group["params"] for group in groups):  # one empty group among others is common: nothing to decay
            raise ArgumentError("params: only empty param groups; expected parameters to train")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_groups(groups, defaults)
        self._state_dtype = check_state_dtype(state_dtype)
        self._seed = check_seed(seed)
        self._tracked: dict[Tensor, Tracked] = {}
        self._accumulating = False
        self._constructing = True
        self._closed = False
        self._interrupted = False
        self._last_verdict: Verdict | None = None
        self._unscale = 1.0  # of the last step; speculation expects it again
        self._pid = os.getpid()
        self._made_as = id(self)
        self._fresh: list[Held] = []
        self._has_masters = False  # other than the parameters' values
        self._firsts: list[int] = []  # id of the first parameter of each group
        self._given = _Given(
            speculation,
            bucket_numel,
            threads,
            replicated,
            check,
            process_group,
            rank_timeout,
            weakref.ref(model) if model is not None else None,
        )
        self._connect([entry[1] if isinstance(entry, tuple) else entry for g in groups for entry in g["params"]])
        self._reduced: ReducedGradients | None = None
        try:
            if trace is not None:
                record(trace, self._core)
            super().__init__(groups, defaults)
            self._announce()
            if self._ranks.session is not None and model is not None:
                from superoffload.integrations.ddp import reduced_gradients

                self._reduced = reduced_gradients(model, _reduction_hook(self))
        except BaseException:
            self.close()
            raise
        self._constructing = False
        _OPEN.add(self)

    def _connect(self, params: Sequence[Tensor]) -> None:
        """To the other ranks, where there are any, and to a new core."""
        given = self._given
        model = given.model() if given.model is not None else None
        self._names = qualified_names(model)
        self._ranks = set_up_ranks(
            params,
            model,
            replicated=given.replicated,
            check=given.check,
            process_group=given.process_group,
            timeout=given.rank_timeout,
        )
        options = CoreOptions(given.speculation, given.bucket_numel, worker_cpus(given.threads, self._ranks.cpus))
        self._core = Core(link_for(params), options, _hyper_reader(self))

    # ---- param groups -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at any time; a step in flight keeps its gradients."""
        group = param_group
        if not self._constructing:  # the constructor has checked all groups already
            self._check_usable()
            (group,) = as_groups([param_group])
            check_groups([group], self.defaults, taken=[p for g in self.param_groups for p in g["params"]])
        with self._whole():
            super().add_param_group(group)
            self._firsts.append(id(group["params"][0]) if group["params"] else 0)
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
        fresh = {param: name for param, name in self._names_of(group) if id(param) in wanted}
        for param, name in fresh.items():  # again: what was frozen may have changed since its group was made
            check_parameter(name, param)
            check_finite(name, param)
        holdings = {param: self._ranks.holding_of(name, param) for param, name in fresh.items()}
        sizes = [holding.part(param).numel() for param, holding in holdings.items()]
        starts = list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))
        dtypes = (torch.float32, self._state_dtype, self._state_dtype)
        slabs = [host_zeros(starts[-1], dtype) for dtype in dtypes]
        shards: list[Shard] = []
        for (param, name), start, numel in zip(fresh.items(), starts, sizes, strict=False):
            master, exp_avg, exp_avg_sq = (slab[start : start + numel] for slab in slabs)
            index = len(self._core.shards) + len(shards)
            shard = Shard(
                index=index,
                name=name,
                group=group,
                numel=numel,
                gradient_dtype=param.dtype,
                published_dtype=param.dtype,
                master=master,
                exp_avg=exp_avg,
                exp_avg_sq=exp_avg_sq,
                target=_target(param, holdings[param]),
                noise_stream=self._seed << 32 | index,
                offset=holdings[param].start,
            )
            master.copy_(shard.target())
            shards.append(shard)
            self._track(param, shard, holdings[param])
        if shards:
            self._core.add_shards(shards)

    def _track(self, param: Tensor, shard: Shard, holding: Holding) -> None:
        step = torch.zeros((), dtype=torch.float32)
        tracked = Tracked(param, shard, step, holding, early=self._ranks.is_early(param))
        tracked.remember_value()
        self._tracked[param] = tracked
        self.state[param] = {
            "step": step,
            "exp_avg": like_parameter(param, holding, shard.exp_avg),
            "exp_avg_sq": like_parameter(param, holding, shard.exp_avg_sq),
            "master": like_parameter(param, holding, shard.master),
        }
        self._fresh.append(Held(shard.name, param, shard, holding))
        self._hook(tracked)

    def _hook(self, tracked: Tracked) -> None:
        if tracked.hook is None and tracked.param.requires_grad and tracked.early:
            tracked.hook = tracked.param.register_post_accumulate_grad_hook(_gradient_hook(self))

    def _names_of(self, group: int) -> Iterator[tuple[Tensor, str]]:
        params = self.param_groups[group]["params"]
        names = self.param_groups[group].get("param_names")
        for i, param in enumerate(params):
            name = str(names[i]) if names else f"param_groups[{group}]['params'][{i}]"
            yield param, self._names.get(id(param), name)

    def _hyper_of(self, group: int) -> GroupHyper:
        values = self.param_groups[group]
        check_group(values)  # they may have been changed since the last step
        beta1, beta2 = values["betas"]
        return GroupHyper(
            float(values["lr"]), float(beta1), float(beta2), float(values["eps"]), float(values["weight_decay"])
        )

    # ---- during backward --------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward inside this context is not the boundary: gradients add up and nothing is packed yet."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _on_gradient(self, param: Tensor) -> None:
        tracked = self._tracked.get(param)
        if tracked is None or self._out_of_use():
            return
        with self._whole():
            self._take_gradient(tracked)

    def _take_gradient(self, tracked: Tracked) -> None:
        core = self._core
        if core.has_gradient(tracked.shard):  # a second backward before step(): undo, the sum is the gradient
            self._let_go(tracked)
        if self._accumulating or tracked.param.grad is None:  # None: another hook has taken it away
            return
        tracked.arrivals += 1
        if tracked.arrivals < tracked.expected:
            return
        self._hand_over(tracked, in_backward=True)

    def _hand_over(self, tracked: Tracked, *, in_backward: bool) -> None:
        grad = tracked.param.grad
        assert grad is not None
        check_gradient(tracked.shard.name, tracked.param, grad)
        if tracked.written:
            self._refresh(tracked)
        if not self._core.is_filling:
            self._core.expect(unscale=self._unscale, max_grad_norm=self._max_grad_norm)
        tracked.remember_grad(grad)
        self._core.arrive(tracked.shard, tracked.holding.part(grad).contiguous(), in_backward=in_backward)

    def _on_reduced(self, param: Tensor, gradient: Tensor) -> None:
        """A reduction over ranks has ended during backward; what it gave becomes ``param.grad``."""
        tracked = self._tracked.get(param)
        if tracked is None or self._out_of_use():
            return
        with self._whole():
            if self._core.has_gradient(tracked.shard):
                self._let_go(tracked)
            if tracked.written:
                self._refresh(tracked)
            if not self._core.is_filling:
                self._core.expect(unscale=self._unscale, max_grad_norm=self._max_grad_norm)
            tracked.reduced = gradient
            self._core.arrive(tracked.shard, tracked.holding.part_of_whole(gradient.view(param.shape)))

    def _refresh(self, tracked: Tracked) -> None:
        tracked.check_still_fits()
        self._core.restore(tracked.shard)  # or an undo would put back the old master
        self._core.protect([tracked.shard])
        tracked.refresh_master()

    # ---- the step ---------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decides the verdict and commits, replays or skips; parameters have their new values when it returns."""
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._whole():
            self._end_step()
        return loss

    @_untraced
    def _end_step(self) -> None:
        session = self._ranks.session
        verdict = self._decide_alone() if session is None else self._decide_with(session)
        if verdict is None:
            return
        self._last_verdict = verdict
        failure: WorkerError | None = None
        try:
            self._core.apply(verdict)
        except WorkerError as error:  # with the step done, or abandoned where no other rank acts on it
            failure = error
        finally:
            try:
                if session is not None and not verdict.found_inf:
                    self._gather_updates(session)
            finally:  # this rank has stepped, also where others have been lost since
                self._after_step()
        if session is not None:
            session.ended(applied=not verdict.found_inf, factor=verdict.gradient_factor)
        if failure is not None:
            raise failure

    def _decide_alone(self) -> Verdict | None:
        self._take_stock()
        if not self._core.is_filling:
            return None
        verdict = self._core.decide(unscale=self._unscale, max_grad_norm=self._max_grad_norm)
        if self._foreign_inf():
            verdict = verdict._replace(found_inf=True)
        return verdict

    def _decide_with(self, session: RankSession) -> Verdict | None:
        """As all ranks do, or RankError on all of them, with the step abandoned."""
        session.begin()
        try:
            self._take_stock()
            session.agree_on(self._settings(), found_inf=self._foreign_inf())
            return self._core.decide(unscale=self._unscale, max_grad_norm=self._max_grad_norm, exchange=session)
        except BaseException as error:
            session.fail()
            if isinstance(error, RankError):
                self._abandon()
            raise

    def _take_stock(self) -> None:
        for index, group in enumerate(self.param_groups):
            check_group(group)
            unfrozen = [p for p in group["params"] if p.grad is not None and p not in self._tracked]
            if unfrozen:
                self._refuse_replaced()
                self._adopt(index, unfrozen)
        self._announce()
        self._unscale = self._take_scale()
        if self._reduced is not None:
            self._reduced.drain()
        self._collect()

    @_untraced
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
        with self._whole():
            self._remove_hooks()
            self._core.close()
            self._tracked.clear()
            self.state.clear()
            self._fresh.clear()
            self._connect(params)
            self._firsts = firsts
            for index, members in enumerate(groups):
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

    def _remove_hooks(self) -> None:
        for tracked in self._tracked.values():
            if tracked.hook is not None:
                tracked.hook.remove()

    def _foreign_inf(self) -> bool:
        """A GradScaler saw a NaN or an infinity before somebody replaced it."""
        return as_float(getattr(self, "found_inf", 0.0)) > 0

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        settings: dict[str, Any] = {}
        for index in range(len(self.param_groups)):
            hyper = self._hyper_of(index)
            settings[f"lr of group {index}"] = hyper.lr
            settings[f"betas, eps, weight_decay of group {index}"] = (
                hyper.beta1,
                hyper.beta2,
                hyper.eps,
                hyper.weight_decay,
            )
        settings["max_grad_norm"] = self._max_grad_norm
        settings["factor that takes the loss scale out"] = self._unscale
        return settings

    def _gather_updates(self, session: RankSession) -> None:
        """Parameters whose state is spread over ranks: the parts that others have stepped."""
        spreads = [
            Spread(held.holding, held.shard.target(), held.copy())
            for held in session.held
            if held.is_spread and held.param.grad is not None
        ]
        if spreads:
            gather(session.group, "the updated parameters", spreads)
            torch.autograd.graph.increment_version([held.param for held in session.held if held.is_spread])

    # torch.amp.GradScaler: do not divide the gradients yourself, set grad_scale and found_inf around step().
    _step_supports_amp_scaling = True

    def _take_scale(self) -> float:
        """The factor that takes the loss scale out of gradients: 1 / grad_scale where a GradScaler calls step()."""
        if not hasattr(self, "grad_scale"):
            return 1.0
        if self.grad_scale is None:  # the user called unscale_(), which version counters do not show
            for tracked in self._tracked.values():
                self._let_go(tracked)
            return 1.0
        scale = as_float(self.grad_scale)
        return 1.0 / scale if scale != 0.0 else math.inf

    def _let_go(self, tracked: Tracked) -> None:
        tracked.grad = None
        self._core.retract(tracked.shard)

    def _collect(self) -> None:
        """Makes the core's view of gradients and parameters that of the user, whatever happened since backward."""
        core = self._core
        for tracked in self._tracked.values():
            self._hook(tracked)  # frozen before, trains now
            if tracked.reduced is not None:
                self._adopt_reduced(tracked)
            if core.has_gradient(tracked.shard) and self._is_edited(tracked):
                self._let_go(tracked)
            if tracked.written:
                self._refresh(tracked)
            if tracked.param.grad is not None and not core.has_gradient(tracked.shard):
                self._hand_over(tracked, in_backward=False)

    def _is_edited(self, tracked: Tracked) -> bool:
        """Whether ``p.grad`` is no longer what the core has.

        Operations on lists of DTensors (torch._foreach_mul_, and so clip_grad_norm_) raise nobody's version, so there
        the bits are compared.
        """
        grad = tracked.param.grad
        if grad is None or tracked.grad_changed:
            return True
        return is_dtensor(grad) and not self._core.gradient_is(tracked.shard, tracked.holding.part(grad))

    def _adopt_reduced(self, tracked: Tracked) -> None:
        """From a reduction to what the user sees: the same bits, or somebody has edited ``p.grad`` since."""
        tracked.reduced = None
        grad = tracked.param.grad
        if grad is not None and self._core.has_gradient(tracked.shard):
            if self._core.gradient_is(tracked.shard, tracked.holding.part(grad)):
                tracked.remember_grad(grad)
            else:
                self._let_go(tracked)

    def _after_step(self) -> None:
        moved = []
        for tracked in self._tracked.values():
            tracked.grad = tracked.reduced = None
            tracked.expected = max(1, tracked.arrivals)
            tracked.arrivals = 0
            tracked.remember_value()
            if tracked.shown_steps != tracked.shard.steps:
                tracked.shown_steps = tracked.shard.steps
                moved.append(tracked.step)
        if moved:
            torch._foreach_add_(moved, 1.0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Without a ``step()`` since backward, the step is abandoned: nothing has changed."""
        if not self._out_of_use():
            with self._whole():
                self._abandon()
        super().zero_grad(set_to_none)

    def _abandon(self) -> None:
        if self._reduced is not None:
            self._reduced.forget()
        for tracked in self._tracked.values():
            tracked.grad = tracked.reduced = None
            tracked.arrivals = 0
        self._core.abandon()

    # ---- what users ask for -----------------------------------------------------------------------------------

    @property
    def max_grad_norm(self) -> float | None:
        """The threshold of the global gradient norm; what it is at ``step()`` counts."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = check_max_grad_norm(value)

    @property
    def last_verdict(self) -> Verdict | None:
        """What the last ``step()`` decided; None before the first one."""
        return self._last_verdict

    @property
    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping (inf when it was skipped)."""
        if self._last_verdict is None:
            raise StateError("grad_norm: there was no step() with gradients yet")
        return self._last_verdict.grad_norm

    @property
    def timeline(self) -> Timeline | None:
        """What records the steps if ``trace`` was given; its ``span("forward")`` adds parts of the training loop."""
        return self._core.timeline

    def stats(self) -> dict[str, float | int]:
        """Totals since construction; superoffload/stats.py explains each."""
        return self._core.stats()

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of all masters, exp_avg, exp_avg_sq and published parameters, as after the last finished step."""
        self._check_usable(closed_too=True)
        with self._whole():
            return self._core.digests()

    def synchronize(self) -> None:
        """Returns once nothing runs: masters and moments are those of the last finished step."""
        self._check_usable(closed_too=True)
        with self._whole():
            self._core.quiesce()

    def refresh_written(self) -> None:
        """Takes over what version counters show was written to parameters, as every ``step()`` does."""
        with self._whole():
            for tracked in self._tracked.values():
                if tracked.written:
                    self._refresh(tracked)

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """From here on every shard is protected before it changes. For superoffload.checkpoints."""
        self._core.snapshot = snapshot

    def end_snapshot(self) -> None:
        """Waits until an earlier snapshot was read."""
        if self._core.snapshot is not None:
            self._core.snapshot.wait()
            self._core.snapshot = None

    def refresh_masters(self) -> None:
        """Takes over parameters that were written by others. Done by itself where version counters show the write;
        needed only after writes that they cannot show (through ``param.data`` or foreign memory)."""
        self._check_usable()
        with self._whole():
            for tracked in self._tracked.values():
                self._refresh(tracked)

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """Masters that keep the bits a model had before it was converted: float32 values by name, or in order.

        The parameters must be their rounding, as after ``model.bfloat16()``. Names are those of the model given as
        ``model=``, or of named parameters; names that are no parameters of the optimizer are left out of account.
        """
        self._check_usable()
        session = self._ranks.session
        params = [
            (name, param)
            for index in range(len(self.param_groups))
            for param, name in self._names_of(index)
            if param in self._tracked
        ]
        try:
            values = read_masters(masters, params, self._part_of)
        except ArgumentError as error:
            if session is not None:
                session.agree("load_masters()", error)
            raise
        if session is not None:
            session.agree("load_masters()", None)
        with self._whole():
            self._abandon()
            self.end_snapshot()
            self._has_masters = True
            for param, value in values:
                tracked = self._tracked[param]
                tracked.shard.master.copy_(value)
                tracked.remember_value()

    def state_dict(self) -> StateDict:
        """``torch.optim.AdamW``'s layout plus ``master`` per parameter, as after the last finished step.

        DTensors for DTensor parameters. State that is spread over ranks (``replicated="shard"``) is gathered, so then
        all ranks must call this.
        """
        self.synchronize()
        state_dict = write_state(super().state_dict())
        session = self._ranks.session
        if session is not None:
            self._gather_state(session, state_dict)
        return state_dict

    def _gather_state(self, session: RankSession, state_dict: StateDict) -> None:
        spreads = []
        params = [param for group in self.param_groups for param in group["params"]]
        for position, values in state_dict["state"].items():
            tracked = self._tracked.get(params[position])
            if tracked is None or tracked.holding.kind != "spread":
                continue
            for name in ("exp_avg", "exp_avg_sq", "master"):
                part = values[name]
                whole = torch.empty(tracked.param.numel(), dtype=part.dtype)
                tracked.holding.own.of(whole).copy_(part)
                values[name] = whole.view(tracked.param.shape)
                spreads.append(Spread(tracked.holding, part, whole))
        if spreads:
            gather(session.group, "state_dict()", spreads)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads our own or ``torch.optim.AdamW``'s; all of it is checked before anything changes, on any rank.

        Where a checkpoint has no masters, or the model's parameters are not their rounding, the parameters win.
        Tensors of the parameters' full shapes fit any number of ranks.
        """
        self._check_usable()
        session = self._ranks.session
        try:
            read = read_state(state_dict, self.param_groups, part_of=self._part_of)
        except Exception as error:
            if session is not None:
                session.agree("load_state_dict()", error)
            raise
        if session is not None:
            session.agree("load_state_dict()", None)
        with self._whole():
            self._abandon()
            self.end_snapshot()
            states = iter(read.states)
            for index, group in enumerate(self.param_groups):
                group.update(read.groups[index])
                found = {param: next(states) for param in group["params"]}
                self._adopt(index, [param for param, values in found.items() if values is not None])
                for param, values in found.items():
                    if param in self._tracked:
                        self._tracked[param].load(values)
            self._announce()
            if session is not None:
                session.loaded(max((tracked.shard.steps for tracked in self._tracked.values()), default=0))

    def _part_of(self, param: Tensor, value: Tensor) -> Tensor:
        tracked = self._tracked.get(param)
        holding = tracked.holding if tracked is not None else self._ranks.holding_of("state_dict", param)
        if not is_dtensor(value):
            return holding.part_of_whole(value)
        if not is_dtensor(param) or value.placements != param.placements or value.device_mesh != param.device_mesh:
            raise ArgumentError(
                f"state_dict: a DTensor with placements {value.placements} over {value.device_mesh}, expected those of "
                "the parameter; pass full tensors, or load it with torch.distributed.checkpoint"
            )
        return holding.part(value)

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads. The state stays readable."""
        try:
            if self._interrupted:
                self._core.pool.close()
            elif not self._out_of_use():
                with self._whole():
                    self._core.close()
        finally:
            self._closed = True
            if self._core.timeline is not None:
                self._core.timeline.close()
            self._remove_hooks()
            _OPEN.discard(self)

    def __del__(self) -> None:
        # Lightning wraps an optimizer in an object of a derived class that shares its attributes and goes before it.
        if hasattr(self, "_core") and self._made_as == id(self):
            self.close()

    def __enter__(self) -> AdamW:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around everything that must be done wholly or not at all. If it is cut off all the same, we say so."""
        with held_signals():
            try:
                yield
            except SuperOffloadError:
                raise  # after putting everything in order
            except BaseException:
                self._interrupted = True
                raise

    def _out_of_use(self) -> bool:
        return self._closed or self._interrupted or self._pid != os.getpid()

    def _check_usable(self, *, closed_too: bool = False) -> None:
        if self._interrupted:
            raise StateError(
                "the optimizer was interrupted in the middle of its work (see the error before this one) and its state "
                "cannot be trusted; make a new one and load the last checkpoint"
            )
        if self._pid != os.getpid():
            raise StateError(
                f"the optimizer was made in process {self._pid} and its worker threads do not survive fork(); "
                "make the optimizer in the process that trains"
            )
        if self._closed and not closed_too:
            raise StateError("the optimizer is closed; make a new one and load the state_dict() of this one")
        if not self._closed:
            self._follow_replaced()


def _target(param: Tensor, holding: Holding) -> Callable[[], Tensor]:
    return lambda: holding.part(param)


def _hyper_reader(optimizer: AdamW) -> Callable[[int], GroupHyper]:
    """Does not keep the optimizer alive, so that it goes when its last user lets go of it."""
    reference = weakref.ref(optimizer)

    def hyper_of(group: int) -> GroupHyper:
        alive = reference()
        assert alive is not None, "the core is used by its optimizer only"
        return alive._hyper_of(group)

    return hyper_of


def _gradient_hook(optimizer: AdamW) -> Callable[[Tensor], None]:
    """Does not keep the optimizer alive: parameters often outlive it."""
    reference = weakref.ref(optimizer)

    def on_gradient(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._on_gradient(param)

    return on_gradient


def _reduction_hook(optimizer: AdamW) -> Callable[[Tensor, Tensor], None]:
    """Likewise, for gradients that a reduction over ranks hands over."""
    reference = weakref.ref(optimizer)

    def on_reduced(param: Tensor, gradient: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._on_reduced(param, gradient)

    return on_reduced

"""``superoffload.AdamW``: a ``torch.optim.Optimizer`` whose state is in host memory and steps during backward."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from superoffload import kernels  # obeys SUPEROFFLOAD_ISA
from superoffload.arguments import (
    check_finite,
    check_group,
    check_max_grad_norm,
    check_parameter,
    refuse_unknown,
)
from superoffload.bucket import ALIGN, GroupHyper, Shard
from superoffload.checkpoint import StateDict, read_state, write_state
from superoffload.core import Core, CoreOptions
from superoffload.cpus import worker_cpus
from superoffload.errors import ArgumentError, StateError
from superoffload.link import HostLink
from superoffload.verdict import Verdict

__all__ = ["AdamW", "kernels"]

_OPEN: weakref.WeakSet[AdamW] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for optimizer in list(_OPEN):
        optimizer.close()


@dataclass(eq=False)
class _Tracked:
    """What is known of one parameter: its shard, and the user-visible versions of value and gradient we acted on."""

    param: Tensor
    shard: Shard
    step: Tensor  # what state[p]["step"] shows
    version: int
    address: int
    grad: Tensor | None = None  # the gradient that was handed to the core in this step
    grad_version: int = 0
    arrivals: int = 0  # backward passes that reached it since the last step
    expected: int = 1  # as many as in the step before
    shown_steps: int = 0

    def remember_value(self) -> None:
        self.version = self.param._version
        self.address = self.param.data_ptr()

    @property
    def written(self) -> bool:
        """Whether somebody else wrote to the parameter since we last looked."""
        return self.param._version != self.version or self.param.data_ptr() != self.address

    @property
    def grad_changed(self) -> bool:
        return self.param.grad is not self.grad or (self.grad is not None and self.grad._version != self.grad_version)


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
        threads: worker threads (None: one per core this process may use).
        rank_check: has no effect in a single process.
        trace: None.

    A step whose gradients contain a NaN or an infinity is skipped and counted, as loss scalers do. A parameter
    without a gradient is left alone, as in torch.

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
        rank_check: str = "light",
        trace: Any = None,
    ) -> None:
        self._max_grad_norm = check_max_grad_norm(max_grad_norm)
        refuse_unknown(delivery, placement, rank_check)
        if keep_grads is False:
            raise ArgumentError("keep_grads=False: gradients on the CPU are always kept; pass True or None")
        if trace is not None:
            raise ArgumentError(f"trace={trace!r}: expected None; timelines are not in this version")
        if bucket_numel is not None and (not isinstance(bucket_numel, int) or bucket_numel < 1):
            raise ArgumentError(f"bucket_numel={bucket_numel!r}: expected a whole number of at least 1, or None")
        cpus = worker_cpus(threads)
        groups = _as_groups(params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _check_all(groups, defaults)
        self._tracked: dict[Tensor, _Tracked] = {}
        self._hooks: list[RemovableHandle] = []
        self._accumulating = False
        self._constructing = True
        self._last_verdict: Verdict | None = None
        self._pid = os.getpid()
        self._core = Core(HostLink(), CoreOptions(speculation, bucket_numel, cpus), self._hyper_of)
        super().__init__(groups, defaults)
        self._constructing = False
        _OPEN.add(self)

    # ---- param groups -----------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at any time; a step in flight keeps its gradients."""
        group = param_group
        if not self._constructing:  # the constructor has checked all groups already
            (group,) = _as_groups([param_group])
            _check_all([group], self.defaults, taken=[p for g in self.param_groups for p in g["params"]])
        super().add_param_group(group)
        self._adopt(len(self.param_groups) - 1)

    def _adopt(self, group: int) -> None:
        """State for the parameters of a group that train and have none yet; frozen ones take no memory."""
        fresh = [p for p in self.param_groups[group]["params"] if p.requires_grad and p not in self._tracked]
        starts, total = [], 0
        for param in fresh:
            starts.append(total)
            total += -(-param.numel() // ALIGN) * ALIGN
        slabs = [torch.zeros(total, dtype=torch.float32) for _ in range(3)]
        shards: list[Shard] = []
        for param, start in zip(fresh, starts, strict=True):
            master, exp_avg, exp_avg_sq = (slab[start : start + param.numel()] for slab in slabs)
            index = len(self._core.shards) + len(shards)
            name = self._name_of(param, group)
            shard = Shard(
                index, name, group, param.numel(), param.dtype, param.dtype, master, exp_avg, exp_avg_sq, _target(param)
            )
            master.copy_(param.detach().reshape(-1))
            shards.append(shard)
            step = torch.zeros((), dtype=torch.float32)
            self._tracked[param] = _Tracked(param, shard, step, param._version, param.data_ptr())
            self.state[param] = {
                "step": step,
                "exp_avg": exp_avg.view(param.shape),
                "exp_avg_sq": exp_avg_sq.view(param.shape),
                "master": master.view(param.shape),
            }
            self._hooks.append(param.register_post_accumulate_grad_hook(_hook(self)))
        if shards:
            self._core.add_shards(shards)

    def _name_of(self, param: Tensor, group: int) -> str:
        names = self.param_groups[group].get("param_names")
        position = next(i for i, p in enumerate(self.param_groups[group]["params"]) if p is param)
        return str(names[position]) if names else f"param_groups[{group}]['params'][{position}]"

    def _hyper_of(self, group: int) -> GroupHyper:
        values = self.param_groups[group]
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
        if tracked is None or self._core_is_gone():
            return
        core = self._core
        if core.has_gradient(tracked.shard):  # a second backward before step(): undo, the sum is the gradient
            core.retract(tracked.shard)
            tracked.grad = None
        if self._accumulating:
            return
        tracked.arrivals += 1
        if tracked.arrivals < tracked.expected:
            return
        if not core.is_filling:
            core.expect(unscale=1.0, max_grad_norm=self._max_grad_norm)
        self._hand_over(tracked, in_backward=True)

    def _hand_over(self, tracked: _Tracked, *, in_backward: bool) -> None:
        grad = tracked.param.grad
        assert grad is not None
        _check_gradient(tracked.shard.name, tracked.param, grad)
        if tracked.written:
            self._refresh(tracked)
        tracked.grad, tracked.grad_version = grad, grad._version
        flat = grad.detach().contiguous().view(-1)
        self._core.arrive(tracked.shard, flat, in_backward=in_backward)

    def _refresh(self, tracked: _Tracked) -> None:
        """Takes over what somebody wrote to the parameter; elements that still are round(master) keep their master."""
        param, shard = tracked.param, tracked.shard
        check_parameter(shard.name, param)
        if param.dtype != shard.published_dtype or param.numel() != shard.numel:
            raise StateError(
                f"{shard.name}: was {shard.numel} elements of {shard.published_dtype}, now {param.numel()} of "
                f"{param.dtype}; make a new optimizer after converting or resizing a model"
            )
        self._core.restore(shard)
        published = param.detach().reshape(-1)
        same = published == shard.master.to(published.dtype)
        shard.master.copy_(torch.where(same, shard.master, published.to(torch.float32)))
        tracked.remember_value()

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
        for group in range(len(self.param_groups)):
            check_group(self.param_groups[group])
            if any(p.grad is not None and p not in self._tracked for p in self.param_groups[group]["params"]):
                self._adopt(group)
        self._collect()
        if self._core.is_filling:
            self._last_verdict = self._core.decide(unscale=1.0, max_grad_norm=self._max_grad_norm)
            try:
                self._core.apply(self._last_verdict)
            finally:
                self._after_step()
        return loss

    def _collect(self) -> None:
        """Makes the core's view of gradients and parameters that of the user, whatever happened since backward."""
        core = self._core
        for tracked in self._tracked.values():
            if core.has_gradient(tracked.shard) and (tracked.grad_changed or tracked.param.grad is None):
                core.retract(tracked.shard)
                tracked.grad = None
            if tracked.written:
                self._refresh(tracked)
            if tracked.param.grad is not None and not core.has_gradient(tracked.shard):
                if not core.is_filling:
                    core.expect(unscale=1.0, max_grad_norm=self._max_grad_norm)
                self._hand_over(tracked, in_backward=False)

    def _after_step(self) -> None:
        moved = []
        for tracked in self._tracked.values():
            tracked.grad = None
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
        if not self._core_is_gone():
            self._abandon()
        super().zero_grad(set_to_none)

    def _abandon(self) -> None:
        for tracked in self._tracked.values():
            tracked.grad = None
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

    def stats(self) -> dict[str, float | int]:
        """Totals since construction; superoffload/stats.py explains each."""
        return self._core.stats()

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of all masters, exp_avg, exp_avg_sq and published parameters, as after the last finished step."""
        self._check_usable()
        return self._core.digests()

    def synchronize(self) -> None:
        """Returns once nothing runs: masters and moments are those of the last finished step."""
        self._check_usable()
        self._core.quiesce()

    def refresh_masters(self) -> None:
        """Takes over parameters that were written by others. Done by itself where version counters show the write;
        needed only after writes that they cannot show (through ``param.data`` or foreign memory)."""
        self._check_usable()
        for tracked in self._tracked.values():
            self._refresh(tracked)

    def state_dict(self) -> StateDict:
        """``torch.optim.AdamW``'s layout plus ``master`` per parameter, as after the last finished step."""
        self.synchronize()
        return write_state(super().state_dict())

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads our own or ``torch.optim.AdamW``'s; all of it is checked before anything changes.

        Where a checkpoint has no masters, or the model's parameters are not their rounding, the parameters win.
        """
        self._check_usable()
        self._abandon()
        order = [param for group in self.param_groups for param in group["params"]]
        read = read_state(state_dict, self.param_groups, self.state)
        for mine, theirs in zip(self.param_groups, read.groups, strict=True):
            mine.update(theirs)
        for position, values in read.states.items():
            tracked = self._tracked.get(order[position])
            if tracked is None:
                continue
            shard = tracked.shard
            shard.steps = values.step
            shard.exp_avg.copy_(values.exp_avg.reshape(-1))
            shard.exp_avg_sq.copy_(values.exp_avg_sq.reshape(-1))
            master = tracked.param.detach() if values.master is None else values.master
            shard.master.copy_(master.reshape(-1))
            tracked.step.fill_(float(values.step))
            tracked.shown_steps = values.step
            tracked.version = -1  # compare with the parameter at the next opportunity

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads. The state stays readable."""
        if not self._core_is_gone():
            self._core.close()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        _OPEN.discard(self)
        self._pid = -1

    def __enter__(self) -> AdamW:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

    def _core_is_gone(self) -> bool:
        return self._pid != os.getpid()

    def _check_usable(self) -> None:
        if self._pid == -1:
            raise StateError("the optimizer is closed")
        if self._core_is_gone():
            raise StateError(
                f"the optimizer was made in process {self._pid} and its worker threads do not survive fork(); "
                "make the optimizer in the process that trains"
            )


def _target(param: Tensor) -> Callable[[], Tensor]:
    return lambda: param.detach().view(-1)


def _hook(optimizer: AdamW) -> Callable[[Tensor], None]:
    """Does not keep the optimizer alive: parameters often outlive it."""
    reference = weakref.ref(optimizer)

    def on_gradient(param: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._on_gradient(param)

    return on_gradient


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """What the base class accepts (parameters, groups, named parameters) as a list of groups of lists."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise ArgumentError(f"params: {type(params).__name__}, expected an iterable such as model.parameters()")
    items = list(params)
    if not items:
        raise ArgumentError("params: empty; expected parameters to train (did a generator run out?)")
    if not isinstance(items[0], dict):
        items = [{"params": items}]
    groups = []
    for group in items:
        if not isinstance(group, dict) or "params" not in group:
            raise ArgumentError(f"params: {group!r}, expected param groups, each a dict with 'params'")
        members = group["params"]
        groups.append({**group, "params": [members] if isinstance(members, Tensor) else list(members)})
    return groups


def _check_all(groups: list[dict[str, Any]], defaults: dict[str, Any], taken: Iterable[Tensor] = ()) -> None:
    seen = {id(param) for param in taken}
    for g, group in enumerate(groups):
        check_group({**defaults, **group})
        if not group["params"]:
            raise ArgumentError(f"param_groups[{g}]: no parameters; expected at least one")
        for i, entry in enumerate(group["params"]):
            named = isinstance(entry, tuple) and len(entry) == 2
            name = f"parameter {entry[0]!r}" if named else f"parameter {i} of param_groups[{g}]"
            param = entry[1] if named else entry
            check_parameter(name, param)
            if id(param) in seen:
                raise ArgumentError(f"{name}: given twice; a tied parameter belongs into one group, once")
            seen.add(id(param))
            check_finite(name, param)


def _check_gradient(name: str, param: Tensor, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise ArgumentError(f"{name}: its gradient has layout {grad.layout}, expected dense (Embedding(sparse=False))")
    if grad.dtype != param.dtype or grad.numel() != param.numel() or grad.device != param.device:
        raise ArgumentError(
            f"{name}: gradient of {grad.dtype} {tuple(grad.shape)} on {grad.device}, "
            f"expected {param.dtype} {tuple(param.shape)} on {param.device}"
        )

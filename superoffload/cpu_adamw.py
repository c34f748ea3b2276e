"""``superoffload.CPUAdamW`` runs the kernels as a plain ``torch.optim.Optimizer`` for CPU tensors.

It has no hooks, no speculation and no clipping. It replaces ``torch.optim.AdamW(fused=True)`` or DeepSpeed's CPU Adam.
``superoffload.AdamW`` is built on the same kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from superoffload import _native
from superoffload.distributed.ownership import Box
from superoffload.engine.bucket import ELEMENT_TYPES
from superoffload.engine.master_halves import following
from superoffload.engine.moments import Axes, check_axes, noise_stream
from superoffload.errors import ArgumentError, WorkerError
from superoffload.host.processors import worker_cpus
from superoffload.host.tensors import in_order, is_dtensor, memory_order, outside_inference, values_in_memory
from superoffload.optimizer.arguments import (
    as_groups,
    check_gradient,
    check_group,
    check_groups,
    check_l2,
    check_parameter,
    check_seed,
    check_state_dtype,
    refuse_other_steps,
    refuse_unknown,
)
from superoffload.optimizer.gradient_source import check_no_main_grad
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.settings import named_in_group
from superoffload.optimizer.state_dict import ParamState, StateDict, blocks_of, read_state, write_state

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from superoffload.optimizer.arguments import TorchDefaults

_pools: WeakValueDictionary[tuple[int, ...], _native.WorkerPool] = WeakValueDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the threads are the parent's


def shared_pool(cpus: list[int]) -> _native.WorkerPool:
    """Returns the worker pool of this process with one thread per entry of ``cpus``, as ``WorkerPool`` reads them.

    Its threads end with the last reference to it, so its ``close()`` is not for the optimizers that share it.
    """
    pool = _pools.get(tuple(cpus))
    return _pools.setdefault(tuple(cpus), _native.WorkerPool(cpus)) if pool is None else pool


_ONE = torch.ones((), dtype=torch.float32, device="cpu")
_ONE_CHUNK = 1 << 16  # elements that a thread takes at a time (csrc/runtime/bucket_work.h)


class CPUAdamW(Optimizer):
    """Steps parameters on the CPU by AdamW (or Adam), in native threads.

    float32 parameters are their own masters; bfloat16 and float16 parameters get a float32 master in
    ``state[p]["master"]`` (set when they are first stepped, so write to such a parameter before that, or through
    ``load_state_dict``).

    Arguments:
        params: parameters or param groups: float32, bfloat16 or float16, dense (in any order of
            dimensions: channels_last, transposed), on the CPU.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; per group, changeable at any time.
        l2: plain Adam, with ``weight_decay`` as an L2 penalty (``torch.optim.Adam``).
        state_dtype: of exp_avg and exp_avg_sq: "fp32", or "bf16" with stochastic rounding (docs/kernel.md).
        seed: of that rounding.
        threads: that step, the calling thread among them (None: one per core this process may use). Those of a process
            that ask for the same number share the others, which end with the last of them.

    As in torch, NaN gradients are applied and parameters without a gradient are left alone. ``DeepSpeedCPUAdam``'s
    default ``weight_decay`` is 0, and its ``adamw_mode=False`` is ``l2=True`` here.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        l2: bool = False,
        state_dtype: str | torch.dtype = "fp32",
        seed: int = 0,
        threads: int | None = None,
        **torchs: Unpack[TorchDefaults],
    ) -> None:
        refuse_unknown(CPUAdamW, torchs)
        groups = as_groups(params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self._l2 = check_l2(l2)
        check_groups(groups, defaults, l2=l2)
        self._state_dtype = check_state_dtype(state_dtype)
        if self._state_dtype == torch.uint8:
            raise ArgumentError(
                "state_dtype='8bit': expected 'fp32' or 'bf16'; CPUAdamW keeps a tensor like the parameter for each "
                "moment, and 8-bit moments have scales beside their codes; superoffload.AdamW has them"
            )
        self._seed = check_seed(seed)
        self._threads = threads
        cpus = worker_cpus(threads)
        Optimizer.__init__(self, groups, defaults)  # not torch.optim.AdamW's, where a derived class is one too
        self._start(cpus)

    def _start(self, cpus: list[int]) -> None:
        self._workers = _Workers(cpus)
        self._ready: dict[int, _Ready] = {}  # by id of the parameter; it keeps no tensor of state alive
        self._works: dict[int, tuple[list[_Ready], _native.BucketWork]] = {}
        self._lifetime = Lifetime(self)
        self._lifetime.open()

    def __getstate__(self) -> dict[str, Any]:
        """Allows copies and pickles, as torch's optimizers do; the copy starts its own worker threads."""
        own = {name: getattr(self, name) for name in ("_l2", "_state_dtype", "_seed", "_threads")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._start(worker_cpus(self._threads))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does; checks its parameters like the constructor."""
        (group,) = as_groups([param_group])
        check_groups([group], self.defaults, l2=self._l2, taken=[p for g in self.param_groups for p in g["params"]])
        for i, entry in enumerate(group["params"]):
            name, param = entry if isinstance(entry, tuple) else (f"parameter {i}", entry)
            if param.requires_grad:  # frozen ones are left alone
                _check_in_host_memory(name, param)
        super().add_param_group(group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @outside_inference
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Steps every parameter that has a gradient.

        After an ArgumentError nothing was changed. After a WorkerError the step was completed although a worker failed.
        """
        self._lifetime.check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lifetime.alone:
            self._lifetime.check_usable()  # another thread may have closed it
            # No other name holds gradients that were copied, so this one keeps them alive until all steps are done.
            grads = [self._gradients(index) for index in range(len(self.param_groups))]
            ready = [self._make_ready(index, mine) for index, mine in enumerate(grads)]
            failures = self._step_groups(ready, grads)
            for mine in grads:  # torch does not see the kernels' writes
                torch.autograd.graph.increment_version([param for param, _, _ in mine])
        if failures:
            raise WorkerError(f"{failures[0]} (the step was completed)")
        return loss

    def _step_groups(self, ready: list[list[_Ready]], grads: list[list[_Given]]) -> list[str]:
        """Steps the groups and returns the errors of worker threads. Nothing of it runs at its end."""
        running: list[_native.Completion] = []
        try:
            for index, (mine, theirs) in enumerate(zip(ready, grads, strict=True)):
                completion = self._step_group(index, mine, theirs) if mine else None
                if completion is not None:
                    running.append(completion)
        finally:
            failures = [failure for failure in map(_failure_of, running) if failure is not None]
        return failures

    def _gradients(self, index: int) -> list[_Given]:
        """Checks a group and returns its parameters that have a gradient."""
        group, ready, state, found = self.param_groups[index], self._ready, self.state, list[_Given]()
        check_group(group)
        refuse_other_steps(f"param_groups[{index}]", group, l2=self._l2)
        for param in group["params"]:
            check_no_main_grad(param)
            grad = param.grad
            if grad is None:
                continue
            known = ready.get(id(param))
            if known is not None and known.fits(param, grad, state.get(param)):
                found.append((param, grad, known))
            else:
                found.append((param, self._check(param, grad), None))
        return found

    def _check(self, param: Tensor, grad: Tensor) -> Tensor:
        check_parameter("parameter", param)
        _check_in_host_memory("parameter", param)
        check_gradient("parameter", param, grad)
        self._check_state(param)
        if self._state_dtype != torch.float32:
            check_axes("parameter", _axes_of(param))
        return values_in_memory(_in_order_of(param, grad))

    def _check_state(self, param: Tensor) -> None:
        """Refuses state that was put beside a parameter by other means than ``load_state_dict`` and does not fit it.

        ``torch.optim.Optimizer.load_state_dict``, which wrappers call, rounds state to the parameter's dtype.
        """
        state = self.state.get(param)
        if not state:
            return
        expected = {"exp_avg": self._state_dtype, "exp_avg_sq": self._state_dtype}
        if param.dtype != torch.float32:
            expected["master"] = torch.float32
        for name, dtype in expected.items():
            value = state.get(name)
            if not isinstance(value, Tensor) or value.dtype != dtype or value.shape != param.shape or not value.is_cpu:
                if name == "master" and name not in state:
                    raise ArgumentError(
                        "state of a parameter: it has no master, as float32 parameters have none, and is "
                        f"{param.dtype} now; convert the model before its first step, or make a new optimizer after it"
                    )
                found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ArgumentError(
                    f"state of a parameter: {name} is {found}, expected {dtype} {tuple(param.shape)} on the CPU; load "
                    "it with CPUAdamW.load_state_dict(), which converts what it can"
                )

    def _fresh(self, param: Tensor) -> dict[str, Tensor]:
        """Makes a parameter's state before its first step."""
        state = {
            "step": torch.zeros((), dtype=torch.float32, device="cpu"),
            "exp_avg": torch.zeros_like(param, dtype=self._state_dtype),
            "exp_avg_sq": torch.zeros_like(param, dtype=self._state_dtype),
        }
        if param.dtype != torch.float32:
            state["master"] = param.detach().to(torch.float32)
        return state

    def _follow_order(self, param: Tensor) -> None:
        """Lays out a parameter's state in memory as the parameter, also after ``model.to(memory_format=...)``."""
        state, order = self.state[param], memory_order(param)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in state and memory_order(state[name]) != order:
                state[name] = torch.empty_like(param, dtype=state[name].dtype).copy_(state[name])

    def _make_ready(self, index: int, given: list[_Given]) -> list[_Ready]:
        """Returns what is stepped of a group. Parameters that are new, or not as they were, get what they need."""
        streams: dict[Tensor, int] = {}
        if self._state_dtype != torch.float32 and any(known is None for *_, known in given):  # else nothing is rounded
            streams = {p: noise_stream(self._seed, name) for name, p in named_in_group(self.param_groups[index], index)}
        if len(self._ready) > 2 * sum(len(group["params"]) for group in self.param_groups):
            self._ready.clear()  # a program that puts new parameters into the groups leaves old ones here
        for param, grad, known in given:
            if known is not None:
                continue
            if self.state[param]:
                self._follow_order(param)
            else:
                self.state[param] = self._fresh(param)
            state = self.state[param]
            # A new tensor: wrappers load one step into the state of all parameters, and each parameter counts its own.
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
            self._ready[id(param)] = _Ready.of(param, state, grad, streams.get(param, 0))
        return [known or self._ready[id(param)] for param, _, known in given]

    def _step_group(self, index: int, ready: list[_Ready], given: list[_Given]) -> _native.Completion | None:
        group, steps = self.param_groups[index], [one.step for one in ready]
        torch._foreach_add_(steps, _ONE)
        kept = self._works.get(index)
        if kept is None or kept[0] != ready:
            kept = self._works[index] = ready, _native.BucketWork([one.run for one in ready], 0)
        work = kept[1]
        work.set_gradients([grad.data_ptr() for _, grad, _ in given])
        work.freeze(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            gradient_factor=-1.0 if group.get("maximize") else 1.0,
            l2=self._l2,
            steps=torch.stack(steps).long().tolist(),
        )
        return self._workers.step(work)

    def state_dict(self) -> StateDict:
        """Copies the state in ``torch.optim.AdamW``'s layout, plus ``master`` for bfloat16 and float16 parameters."""
        return write_state(super().state_dict(), l2=self._l2)

    @outside_inference
    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads a state of this class, of ``superoffload.AdamW`` or of torch; checks all of it before any change.

        Existing state is overwritten block by block, so loading needs no memory beside ``state_dict`` itself.
        """
        read = read_state(state_dict, self.param_groups, l2=self._l2, part_of=_in_order_of)
        params = [param for group in self.param_groups for param in group["params"]]
        loaded = [(param, values) for param, values in zip(params, read.states, strict=True) if values is not None]
        fresh = {param: self._fresh(param) for param, _ in loaded if not self._fits(param)}
        with self._lifetime.alone:
            for group, saved in zip(self.param_groups, read.groups, strict=True):
                group.update(saved)
            for param, values in zip(params, read.states, strict=True):
                if values is None:
                    self.state.pop(param, None)
                    continue
                if param in fresh:
                    self.state[param] = fresh[param]
                self._load(param, values)
            self._ready.clear()

    def _fits(self, param: Tensor) -> bool:
        """Tells whether the existing state fits ``param`` as it is now."""
        state = self.state.get(param, {})
        return (
            {"step", "exp_avg", "exp_avg_sq"} <= set(state)
            and state["exp_avg"].shape == param.shape
            and state["exp_avg"].dtype == self._state_dtype
            and memory_order(state["exp_avg"]) == memory_order(param)
            and ("master" in state) == (param.dtype != torch.float32)
        )

    def _load(self, param: Tensor, values: ParamState) -> None:
        state = self.state[param]
        state["step"].fill_(float(values.step))
        values.exp_avg.copy_to(_in_order_of(param, state["exp_avg"]))
        values.exp_avg_sq.copy_to(_in_order_of(param, state["exp_avg_sq"]))
        if "master" in state:
            master, published = _in_order_of(param, state["master"]), _in_order_of(param, param.detach())
            if values.master is None:
                master.copy_(published)
            else:
                values.master.copy_to(master)
                for at, block in blocks_of(published):
                    masters = master[at : at + len(block)]
                    masters.copy_(following(masters, block))  # the parameter is what the user sees

    def close(self) -> None:
        """Ends the worker threads. The state stays readable."""
        self._lifetime.close(self._workers, lambda: None)


class _Workers:
    """Steps buckets in the calling thread and those that all of these optimizers with the same number share."""

    def __init__(self, cpus: list[int]) -> None:
        self.pool: _native.WorkerPool | None = shared_pool(cpus[1:]) if len(cpus) > 1 else None

    def step(self, work: _native.BucketWork) -> _native.Completion | None:
        """Steps. None: it is done, since waking a thread for so little would take longer, or there is none."""
        if self.pool is None or work.numel <= _ONE_CHUNK:
            work.run_all(_native.Operation.step)
            return None
        return self.pool.run(work, _native.Operation.step)

    def close(self) -> None:
        """Lets go of the threads; they end with the last optimizer that has them. No step of this one is running."""
        self.pool = None

    end_threads = close


def _failure_of(completion: _native.Completion) -> str | None:
    """Waits for the end of a step and returns its error message, or None."""
    try:
        completion.wait()
    except RuntimeError as error:
        return str(error)
    return None


def _check_in_host_memory(name: str, param: Tensor) -> None:
    found = "a DTensor" if is_dtensor(param) else f"on {param.device}"
    if found != "on cpu":
        raise ArgumentError(f"{name}: {found}, expected a plain tensor on the CPU; superoffload.AdamW steps it")


def _in_order_of(param: Tensor, value: Tensor) -> Tensor:
    """Flattens ``value``, of the parameter's shape, in the order of the parameter's elements in memory."""
    return in_order(value, memory_order(param))


def _axes_of(param: Tensor) -> Axes:
    """Returns how the parameter's elements, in the order of its memory, lie in a contiguous one."""
    return () if param.is_contiguous() else Box.whole(param.shape).axes_in(param.shape, memory_order(param))


# A parameter; its gradient, contiguous in memory; what is known of it, or None if anything has changed.
_Given = tuple[Tensor, Tensor, "_Ready | None"]


@dataclass(eq=False, slots=True)
class _Ready:
    """Describes a parameter and its state that were checked, and how the native code steps them.

    ``place`` and ``places``: how it and its state lie in memory. A state with ``step`` is that of this parameter.
    """

    step: Tensor
    place: tuple[Any, ...]
    places: dict[str, tuple[Any, ...]]
    grad_dtype: torch.dtype
    run: _native.Run

    @staticmethod
    def of(param: Tensor, state: dict[str, Tensor], grad: Tensor, stream: int) -> _Ready:
        run = _native.Run(
            master=state.get("master", param).data_ptr(),
            exp_avg=state["exp_avg"].data_ptr(),
            exp_avg_sq=state["exp_avg_sq"].data_ptr(),
            gradient=0,
            shadow=param.data_ptr() if "master" in state else 0,
            numel=param.numel(),
            gradient_type=ELEMENT_TYPES[grad.dtype],
            shadow_type=ELEMENT_TYPES[param.dtype],
            state_type=ELEMENT_TYPES[state["exp_avg"].dtype],
            axes=() if state["exp_avg"].dtype == torch.float32 else _axes_of(param),
            noise_stream=stream,
        )
        places = {name: _place_of(one) for name, one in state.items() if name in ("exp_avg", "exp_avg_sq", "master")}
        return _Ready(state["step"], _place_of(param), places, grad.dtype, run)

    def fits(self, param: Tensor, grad: Tensor, state: dict[str, Any] | None) -> bool:
        """Tells whether all is as it was when it was checked, and ``grad`` lies in memory as the parameter does."""
        if state is None or state.get("step") is not self.step or _place_of(param) != self.place:
            return False
        for name, place in self.places.items():
            tensor = state.get(name)
            if not isinstance(tensor, Tensor) or _place_of(tensor) != place:
                return False
        _, _, shape, strides = self.place
        return (
            type(grad) is Tensor
            and grad.dtype is self.grad_dtype
            and grad.layout is torch.strided
            and grad.shape == shape
            and grad.stride() == strides
            and not grad.is_neg()
            and grad.data_ptr() != 0
        )


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()

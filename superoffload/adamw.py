"""``superoffload.AdamW`` is a ``torch.optim.Optimizer`` with its state in host memory, which steps during backward.

This file has its arguments and the methods that users call. Its parts are in ``superoffload/optimizer/``.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload import kernels  # obeys SUPEROFFLOAD_ISA
from superoffload.engine.engine import Engine
from superoffload.engine.options import Recorder
from superoffload.engine.verdict import Verdict
from superoffload.errors import StateError
from superoffload.host.environment import check_environment
from superoffload.host.tensors import outside_inference
from superoffload.optimizer.accumulation import Accumulating
from superoffload.optimizer.adamw_parts import Parts, PermanentParts, assemble
from superoffload.optimizer.arguments import check_given, params_of, refuse_unknown
from superoffload.optimizer.delivery import CheckReads
from superoffload.optimizer.frameworks import is_copying_state
from superoffload.optimizer.gradient_source import clear_main_grad
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.settings import ClipSettings, LossScale, ParamGroups
from superoffload.optimizer.state import agreed
from superoffload.optimizer.state_dict import ReadState, StateDict
from superoffload.timeline import Timeline, record

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from superoffload.optimizer.arguments import TorchDefaults

__all__ = ["AdamW", "kernels"]


class AdamW(Optimizer):
    """Computes AdamW with offloaded state, speculation and exact clipping.

    The arithmetic is that of ``torch.optim.AdamW`` in fp32 (Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019), with fp32 masters; docs/kernel.md has it operation by operation.

    Arguments:
        params: parameters or param groups: float32, bfloat16 or float16, dense (in any order of dimensions:
            channels_last, transposed), all on the CPU or all on one CUDA device. Gradients have the same dtype or
            float32 (``p.grad_dtype``), or are in ``p.main_grad`` as in Megatron (docs/edits.md).
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``; per group, changeable at any time. Its
            ``fused`` and ``foreach``, which choose its loop, are accepted and change nothing.
        max_grad_norm: clip the global gradient norm to this (None: no clipping). Changeable between steps. Replaces
            ``torch.nn.utils.clip_grad_norm_``.
        speculation: "adaptive" (chooses by prediction and measured times), "always" or "never" (docs/pipeline.md). It
            never changes a result.
        delivery: with "eager", parameters have their new values when ``step()`` returns. With "on_demand" (needs
            ``module`` or ``model``), ``step()`` returns at once; forward passes and ``state_dict()`` of the module wait
            for the parameters that they read. Call ``synchronize()`` before other code reads or writes parameters;
            ``check_reads()`` finds such code (docs/pipeline.md).
        keep_grads: whether gradients stay in ``p.grad`` after they were packed. None: they stay on the CPU and with
            ``model=`` a ``DistributedDataParallel``, and are freed on a GPU, which saves their memory. Code that reads,
            clips, edits or adds to a freed gradient gets it back from host memory, which is right and slower
            (docs/pipeline.md). False is an error where gradients are always kept.
        placement: which state stays on the accelerator, to be stepped there after the verdict, with the same bits:
            {"gpu_fraction": f} for that part of the parameters, those whose gradients come last in backward; "auto"
            to choose after a few steps by measured times and free memory; or None. Not on the CPU (docs/pipeline.md).
        bucket_numel: elements per bucket (None: a 32nd of the parameters, within 64 Ki and 32 Mi).
        threads: worker threads (None: one per core that this process may use, shared with other ranks on the node;
            beside a GPU one of five, and two of six or more, are left to the threads that serve it).
        rank_check: "off", "light" (one exchange of at most 128 bytes per step), "full" (everything in every step) or
            {"full": N} (light, and everything every N steps). Unless it is "off", everything is checked in the first
            three steps and after a load (docs/ranks.md). It has no effect in a single process.
        trace: the file to write a timeline of every step to, replaced if it is there (docs/metrics.md); None: none.
        module: the module whose forward passes wait for parameters on demand. It also serves as ``model``.
        model: the model of these parameters. Errors use its qualified names, and a full check sees the parameters that
            its forward gathers (``fully_shard``). A ``DistributedDataParallel`` gets our communication hook, so that
            its gradients can be stepped during backward; the first ``step()`` finds one that is not given.
        replicated: what ranks do with plain parameters, which each has in full: "replicate" the state, "shard" it over
            the ranks (each steps its part and gets the others), or "local": this process shares them with no rank.
            None: "replicate".
        process_group: the ranks that share a verdict (None: all). They communicate over a gloo group of our own. With
            fewer than all ranks, or with "local", ``max_grad_norm`` counts their norm alone; a warning says so once.
        rank_timeout: seconds to wait for other ranks (None: SUPEROFFLOAD_RANK_TIMEOUT, else 60).
        state_dtype: of exp_avg and exp_avg_sq: "fp32" (12 bytes of state per parameter), or rounded stochastically:
            "bf16" (8), or "8bit" (6), which ``state[p]`` shows as bfloat16 copies. docs/settings.md: what it costs.
        master_dtype: "fp32", or "split" to keep the fp32 masters of bfloat16 parameters as the published value and a
            remainder of 16 bits, which is 2 bytes less; ``state[p]["master"]`` is then a copy (docs/kernel.md).
        accumulate_dtype: with "fp32", gradients of bf16 and fp16 parameters add up in fp32 over the backward passes of
            a step, with or without ``accumulate()``, and ``p.grad`` is in fp32, for 2 more bytes per parameter. If the
            GPU has no room for these sums, they are made in host memory, which is slower; this alone concerns fp32
            parameters too. It does not affect checkpoints. It needs torch 2.10 or ``p.main_grad``, and is refused with
            ``DistributedDataParallel``. None: gradients add up in the parameter's dtype, or in ``p.grad_dtype``
            (docs/edits.md).
        seed: the seed for the rounding of state. The same seed gives the same bits with any speculation.

    A step whose gradients contain a NaN or an infinity is skipped and counted, as loss scalers do. A parameter
    without a gradient is left alone, as in torch. ``torch.amp.GradScaler`` works, with or without its ``unscale_``.

    Version counters show writes to parameters and gradients, but not those to a parameter through ``.data``. These show
    in its bits, which are compared in every step in host memory, and on a device in the first 3 steps and every 16th
    (docs/edits.md). Call ``refresh_masters()`` after such writes. Edit ``p.grad`` itself, not its ``.data``.

    Raises ArgumentError (a ValueError) for bad arguments before anything is changed. For a keyword argument that does
    not exist the error is a TypeError too, and names the one that was meant.
    """

    @outside_inference
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        speculation: str = "adaptive",
        delivery: str = "eager",
        keep_grads: bool | None = None,
        placement: Any = None,
        bucket_numel: int | None = None,
        threads: int | None = None,
        rank_check: str | Mapping[str, int] = "light",
        trace: Any = None,
        module: nn.Module | None = None,
        model: nn.Module | None = None,
        replicated: str | None = None,
        process_group: Any = None,
        rank_timeout: float | None = None,
        state_dtype: str | torch.dtype = "fp32",
        master_dtype: str | torch.dtype = "fp32",
        accumulate_dtype: str | torch.dtype | None = None,
        seed: int = 0,
        **torchs: Unpack[TorchDefaults],
    ) -> None:
        arguments = dict(locals())
        refuse_unknown(AdamW, torchs)
        check_environment()
        clipping = ClipSettings(max_grad_norm)
        defaults = {name: arguments[name] for name in ("lr", "betas", "eps", "weight_decay", "maximize")}
        groups, given = check_given(params, defaults, arguments)
        self._lifetime = Lifetime(self)
        recorder = Recorder() if trace is None else record(trace)
        self._permanent = PermanentParts(self._lifetime, ParamGroups(self), clipping, given, recorder)
        self._parts = assemble(self._permanent, params_of(groups))
        try:
            super().__init__(groups, defaults)
            self._ranks.announce()
            self._permanent.say_whose_norm(self._ranks)  # raises where warnings are errors
        except BaseException:
            self.close()
            raise
        self._lifetime.open()

    @property
    def _engine(self) -> Engine:
        return self._parts.engine

    @property
    def _ranks(self) -> Ranks:
        return self._parts.ranks

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """As in torch: the state of the last finished step, and edits count. Tensors are those that are stepped. While
        a program keeps one, its part of the model is not stepped during backward (docs/edits.md)."""
        return self._permanent.views.mapping

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._permanent.views.replace(value)

    @outside_inference
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch, at any time; a step in flight keeps its gradients."""
        lifetime, group = self._lifetime, param_group
        if lifetime.is_open:  # the constructor has checked all groups already
            self._parts.delivery.check_new(group["params"])
            self.check_usable()
            group = self._permanent.check_group(group, self.defaults)
        with lifetime.alone:
            super().add_param_group(group)  # may raise, as where only some groups have names
            with lifetime.whole():
                with self._permanent.groups.one_more(self._parts.params.get) as index:
                    self._parts.adopt(self._permanent, index)
                if lifetime.is_open:
                    self._ranks.announce()

    @outside_inference
    def _start_anew(self) -> None:
        """Makes new parts for the groups and the model that there are now; each parameter keeps its state."""
        self._parts.state.await_snapshots()
        with self._lifetime.whole():
            self._parts = self._parts.regrouped(self._permanent)

    @property
    def parts(self) -> Parts:
        """Returns what the optimizer is made of, for superoffload.checkpoints and adapters, not for programs."""
        return self._parts

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @outside_inference
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decides the verdict and commits, replays, steps or skips. Parameters have their new values when it returns;
        with delivery="on_demand", when the module's forward reads them."""
        self.check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lifetime.whole():
            self.check_usable()  # the closure, or another thread, may have closed it
            if self._permanent.groups.params():
                if self._parts.follow_found_model(self._permanent):
                    self._start_anew()
                self._parts.step.run(LossScale.on(self))
            else:  # the program has emptied the groups
                self._permanent.clipping.without_gradients()
                self._parts.step.abandon()
        self._parts.advice.tell()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells a ``torch.amp.GradScaler`` to set ``grad_scale`` and ``found_inf`` around ``step()`` instead of
        dividing the gradients. Other code asks whether it must not clip them, as Lightning does: it may."""
        frame = inspect.currentframe()
        asking = None if frame is None else frame.f_back
        return asking is not None and isinstance(asking.f_locals.get("self"), torch.amp.GradScaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, as in torch. Without a ``step()`` since backward it abandons the step: nothing changes."""
        self._lifetime.work.if_in_use(self._parts.step.abandon)
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                clear_main_grad(param)
        self._lifetime.work.if_in_use(self._engine.layout.make_way)

    def accumulate(self) -> Accumulating:
        """Returns a context in which backward is not the boundary: gradients add up and nothing is stepped yet."""
        return self._permanent.accumulation.context()

    def check_reads(self) -> CheckReads:
        """Returns a context, for debugging, in which a read or write of an undelivered parameter is a StateError.

        It also sees views and tensors that share its memory, but not NumPy arrays and compiled code; it is slow."""
        return self._parts.delivery.check_reads()

    @property
    def max_grad_norm(self) -> float | None:
        """Returns the threshold of the global gradient norm; its value at ``step()`` counts."""
        return self._permanent.clipping.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._permanent.clipping.set_max_grad_norm(value)
        self._permanent.say_whose_norm(self._ranks)

    @property
    def last_verdict(self) -> Verdict | None:
        """Returns the verdict of the last ``step()``; None before the first one."""
        return self._permanent.clipping.last

    @property
    def step_was_skipped(self) -> bool:
        """Returns whether the last ``step()`` was skipped, because gradients or their norm were NaN or infinite."""
        return self._permanent.clipping.step_was_skipped

    @property
    def grad_norm(self) -> float:
        """Returns the global gradient norm of the last step, before clipping (inf if it was not finite)."""
        return self._permanent.clipping.grad_norm

    @property
    def timeline(self) -> Timeline | None:
        """Returns the recorder of steps if ``trace`` was given; its ``span("forward")`` adds parts of the loop."""
        recorder = self._permanent.recorder
        return recorder if isinstance(recorder, Timeline) else None

    @property
    def placement(self) -> dict[str, Any] | None:
        """Returns the part of the parameters whose state should be on the accelerator, the number there, and why."""
        return self._parts.placement()

    def stats(self) -> dict[str, float | int]:
        """Returns totals since construction; superoffload/engine/stats.py explains them."""
        return self._parts.stats(self._permanent)

    def state_digests(self) -> dict[str, str]:
        """Returns SHA-256 digests of masters, exp_avg, exp_avg_sq and published parameters, after the last step."""
        self.check_usable(closed_too=True)
        return self._parts.state.digests()

    def synchronize(self) -> None:
        """Returns once nothing runs: masters and moments are those of the last finished step."""
        self.check_usable(closed_too=True)
        self._parts.state.quiesce()

    @outside_inference
    def refresh_masters(self) -> None:
        """Takes over all parameters at once, after writes that only bits show. ``step()`` takes over the writes that it
        notices: all that version counters show, those through ``param.data`` in host memory, and on a device those that
        it finds in the first steps and in every 16th (docs/edits.md)."""
        self.check_usable()
        self._parts.state.follow_parameters()

    @outside_inference
    def sleep(self) -> None:
        """Finishes the last step and gives back all memory but masters and moments, on this rank, until ``wake()``.
        Raises StateError, and changes nothing, where gradients wait for ``step()``: docs/rl.md."""
        self._parts.sleep.sleep()

    @outside_inference
    def wake(self) -> None:
        """Takes the memory back: the run goes on with the bits of one that never slept, written parameters included.
        Raises, still asleep, where memory is refused or a parameter is not on its device."""
        self._parts.sleep.wake()

    @outside_inference
    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """Loads masters with the bits that a model had before its conversion: float32 values by name, or in order.

        The parameters must be their rounding, as after ``model.bfloat16()``. Names are those of the model given as
        ``model=``, or of named parameters; names that are not parameters of the optimizer are ignored."""
        self.check_usable()
        self._parts.state.load_masters(masters)

    def state_dict(self, *, copy: bool = True) -> StateDict:
        """Returns the state of the last finished step: ``torch.optim.AdamW``'s layout plus ``master`` per parameter.

        It is a copy in host memory, as large as moments and masters. ``copy=False``, to save it before the next
        backward: the state itself, as torch has it; only split masters and 8-bit moments are copied. DTensor parameters
        have DTensors. With ``replicated="shard"`` state is gathered, so all ranks must call this."""
        self.check_usable(closed_too=True)
        if is_copying_state():
            return {"state": {}, "param_groups": []}
        return self._parts.state.as_dict(super().state_dict, copy=copy)

    @outside_inference
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads our own or ``torch.optim.AdamW``'s state; all ranks check all of it before anything changes.

        Where a checkpoint has no masters, or the model's parameters are not their rounding, the parameters win.
        Tensors of full shapes fit any number of ranks. Values are copied block by block into the existing state."""
        if is_copying_state():
            return

        def check() -> ReadState:
            self.check_usable(to_load=True)
            return self._parts.state.check(state_dict)

        read = agreed(self._ranks, "load_state_dict()", check)
        self._parts.state.take_over(read, "load_state_dict()")

    def check_usable(self, *, closed_too: bool = False, to_load: bool = False) -> None:
        """Raises if the optimizer cannot be used, else has ``parts`` follow the param groups. ``closed_too`` accepts
        one that is closed or asleep, ``to_load`` one whose state was loaded in part."""
        self._lifetime.check_usable(closed_too=closed_too, to_load=to_load)
        groups = self._permanent.groups
        if not self._lifetime.closed and not self._lifetime.asleep and groups.changed() and groups.params():
            self._start_anew()

    def close(self) -> None:
        """Undoes speculation and ends the worker threads. The state stays readable."""
        self._lifetime.close(self._engine, lambda: self._parts.end(self._permanent))

    def __del__(self) -> None:
        if hasattr(self, "_parts") and self._lifetime.ends_with(self):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Returns what torch prints, with our own settings before the param groups."""
        settings = {"max_grad_norm": self.max_grad_norm, **self._permanent.given.shown()}
        first, _, groups = super().__repr__().partition("\n")
        return "\n".join([first, *(f"    {name}: {value}" for name, value in settings.items()), groups])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

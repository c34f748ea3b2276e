"""``superoffload.AdamW``: a ``torch.optim.Optimizer`` whose state is in host memory and steps during backward.

This file: its arguments and what users ask for. What it owns is in ``superoffload/optimizer/``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from superoffload import kernels  # obeys SUPEROFFLOAD_ISA
from superoffload.distributed.ownership import Holding
from superoffload.engine.engine import Engine
from superoffload.engine.recorder import Recorder
from superoffload.engine.verdict import Verdict
from superoffload.errors import StateError
from superoffload.host.environment import check_environment
from superoffload.optimizer.accumulating import Accumulating
from superoffload.optimizer.adamw_parts import Lasting, assemble
from superoffload.optimizer.check_reads import CheckReads
from superoffload.optimizer.given import check_given, params_of
from superoffload.optimizer.gradient_source import clear_main_grad
from superoffload.optimizer.groups import ParamGroups
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.other_ranks import Ranks
from superoffload.optimizer.state import agreed
from superoffload.optimizer.state_dict import ReadState, StateDict
from superoffload.optimizer.unknown_arguments import refuse_unknown
from superoffload.optimizer.untraced import untraced
from superoffload.optimizer.verdicts import LossScale, Verdicts
from superoffload.optimizer.watched import Tracked
from superoffload.timeline import Timeline, record

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from superoffload.distributed.session import RankSession
    from superoffload.engine.snapshot import Snapshot
    from superoffload.optimizer.unknown_arguments import TorchDefaults

__all__ = ["AdamW", "kernels"]


class AdamW(Optimizer):
    """AdamW with offloaded state, speculation and exact clipping.

    The arithmetic is that of ``torch.optim.AdamW`` in fp32 (Loshchilov and Hutter, "Decoupled Weight Decay
    Regularization", 2019), with fp32 masters; docs/kernel.md has it operation by operation.

    Arguments:
        params: parameters or param groups: float32, bfloat16 or float16, dense (in any order of dimensions:
            channels_last, transposed), all on the CPU or all on one CUDA device. Their gradients: in the same dtype or
            in float32 (``p.grad_dtype``), or ``p.main_grad`` as in Megatron (docs/edits.md).
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``; per group, changeable at any time.
        max_grad_norm: clip the global gradient norm to this (None: no clipping). Changeable between steps. Replaces
            ``torch.nn.utils.clip_grad_norm_``.
        speculation: "adaptive" (chooses by prediction and measured times), "always" or "never": docs/pipeline.md. Never
            changes a result.
        delivery: "eager": parameters have their new values when ``step()`` returns. "on_demand" (needs ``module``):
            ``step()`` returns at once, and forward passes and ``state_dict()`` of the module wait for the parameters
            that they read; call ``synchronize()`` before anything else reads or writes parameters, and find what does
            with ``check_reads()``. docs/pipeline.md.
        keep_grads: whether gradients stay in ``p.grad`` after they were packed. None: they do on the CPU and with
            ``model=`` a ``DistributedDataParallel``, and are freed on a GPU, which saves their memory; what then reads,
            clips, edits or adds to one gets it back from host memory, which is right and slower (docs/pipeline.md).
            False, where they are always kept, is an error.
        placement: which state stays on the accelerator, where it is stepped after the verdict with the same bits:
            {"gpu_fraction": f}, the parameters whose gradients come last in backward, up to that part of all; "auto",
            chosen after a few steps from measured times and free memory; None. docs/pipeline.md. Not on the CPU.
        bucket_numel: elements per bucket (None: a 32nd of the parameters, within 64 Ki and 32 Mi).
        threads: worker threads (None: one per core this process may use, shared with other ranks on the node; beside a
            GPU two of more than four are left to the threads that feed and follow it).
        rank_check: "off", "light" (every step, one exchange of at most 128 bytes), "full" (every step, everything) or
            {"full": N}: light, and everything every N steps. Unless it is "off", everything is checked in the first
            three steps and after a load. docs/ranks.md. No effect in a single process.
        trace: write a timeline of every step to this file (docs/timeline.md); None: none is recorded.
        module: whose forward passes wait for parameters that are delivered on demand. Also all that ``model`` is.
        model: whose parameters these are: gives errors their qualified names, and lets a full check see what forward
            gathers (``fully_shard``); a ``DistributedDataParallel`` gets our communication hook, without which its
            gradients cannot be stepped during backward.
        replicated: what several ranks do about plain parameters, which each has in full: "replicate" the state,
            "shard" it over the ranks (each steps its part and gets the others'), or "local": this process is alone
            with them. None: "replicate".
        process_group: the ranks that share a verdict (None: all). We exchange over a gloo group of our own. Where that
            is not all of them, or with "local", ``max_grad_norm`` is about their norm alone: a warning says so once.
        rank_timeout: seconds to wait for other ranks (None: SUPEROFFLOAD_RANK_TIMEOUT, else 60).
        state_dtype: of exp_avg and exp_avg_sq: "fp32", or "bf16" with stochastic rounding: 20 instead of 28 bytes moved
            and 8 instead of 12 kept per parameter. docs/kernel.md shows what it costs in accuracy.
        accumulate_dtype: "fp32": gradients of bf16 and fp16 parameters add up in fp32 over the backward passes of a
            step, with or without ``accumulate()``, and ``p.grad`` is in fp32, for 2 more bytes per parameter. A GPU
            without room for these sums has them made in host memory, which is slower. No effect on checkpoints, and on
            fp32 parameters but for that. Needs torch 2.10 or ``p.main_grad``; refused with
            ``DistributedDataParallel``. None: they add up in the parameter's dtype, or in that of ``p.grad_dtype``.
            docs/edits.md.
        seed: of the rounding of state; the same seed gives the same bits, whatever was speculated, undone or replayed.

    A step whose gradients contain a NaN or an infinity is skipped and counted, as loss scalers do. A parameter
    without a gradient is left alone, as in torch. ``torch.amp.GradScaler`` works, with or without its ``unscale_``.

    Writes to parameters and gradients are noticed by their version counters. Those to a parameter that go through
    ``.data`` leave no trace there; in host memory they are noticed by its bits and kept, with one warning, on a device
    within 16 steps (docs/edits.md); ``refresh_masters()`` tells of them at once. Edit ``p.grad`` itself.

    Raises ArgumentError (a ValueError) for bad arguments before anything is changed; for a keyword argument that does
    not exist it is a TypeError too, and names the one that was meant.
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
        module: nn.Module | None = None,
        model: nn.Module | None = None,
        replicated: str | None = None,
        process_group: Any = None,
        rank_timeout: float | None = None,
        state_dtype: str | torch.dtype = "fp32",
        accumulate_dtype: str | torch.dtype | None = None,
        seed: int = 0,
        **torchs: Unpack[TorchDefaults],
    ) -> None:
        arguments = dict(locals())
        refuse_unknown(AdamW, torchs)
        check_environment()
        verdicts = Verdicts(max_grad_norm)
        defaults = {name: arguments[name] for name in ("lr", "betas", "eps", "weight_decay")}
        groups, given = check_given(params, defaults, arguments)
        self._lifetime = Lifetime(self)
        recorder = Recorder() if trace is None else record(trace)
        self._lasting = Lasting(self._lifetime, ParamGroups(self), verdicts, given, recorder)
        self._parts = assemble(self._lasting, params_of(groups))
        try:
            super().__init__(groups, defaults)
            self._ranks.announce()
            self._lasting.follow_reductions(self._ranks)
            self._lasting.say_whose_norm(self._ranks)  # where warnings are errors, it raises
        except BaseException:
            self.close()
            raise
        self._lifetime.open()

    @property
    def _core(self) -> Engine:
        return self._parts.core

    @property
    def _ranks(self) -> Ranks:
        return self._parts.ranks

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """As in torch. The tensors are those that are stepped: after a two-phase step they follow a little later, so
        read them anew from here, which waits for that, or after ``synchronize()``."""
        if not self._lifetime.work.out_of_use():
            with self._lifetime.whole():
                self._core.tail.settle()
        return self._lasting.views.mapping

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        self._lasting.views.replace(value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at any time; a step in flight keeps its gradients."""
        lifetime, group = self._lifetime, param_group
        if lifetime.is_open:  # the constructor has checked all groups already
            self._parts.delivery.check_new(group["params"])
            self._check_usable()
            group = self._lasting.check_group(group, self.defaults)
        with lifetime.alone:
            super().add_param_group(group)  # may refuse, as where some groups have names and others have not
            with lifetime.whole():
                self._parts.adopt(self._lasting, self._lasting.groups.one_more())
                if lifetime.is_open:
                    self._ranks.announce()

    @untraced
    def _follow_replaced(self) -> None:
        """Accelerate puts sharded parameters into the groups when it prepares a model for FSDP2: starts anew on them.

        Not once there is state that would be lost.
        """
        if not self._lasting.groups.replaced() or not self._parts.may_be_replaced(self._lasting):
            return
        with self._lifetime.whole():
            self._parts = self._parts.anew(self._lasting)
            self._parts.adopt_all(self._lasting)

    @property
    def rank_session(self) -> RankSession | None:
        """The ranks that share the verdict; None: this process decides alone. For superoffload.checkpoints."""
        return self._ranks.session

    def tracked(self, param: Tensor) -> Tracked | None:
        """What is known of a parameter that has state; None where it has none. For superoffload.checkpoints."""
        return self._parts.params.get(param)

    def holding_of(self, param: Tensor) -> Holding:
        """The part of a parameter whose state this rank has, or would have if it trained."""
        return self._parts.params.holding_of(param)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Decides the verdict and commits, replays or skips. Parameters have their new values when it returns; with
        delivery="on_demand", when the module's forward reads them."""
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._lifetime.whole():
            self._check_usable()  # the closure, or another thread, may have closed it
            self._parts.boundary.end_step(LossScale.on(self))
        self._parts.advice.tell()
        return loss

    # torch.amp.GradScaler: do not divide the gradients yourself, set grad_scale and found_inf around step().
    _step_supports_amp_scaling = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Without a ``step()`` since backward, the step is abandoned: nothing has changed."""
        self._lifetime.work.if_in_use(self._parts.boundary.abandon)
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                clear_main_grad(param)
        self._lifetime.work.if_in_use(self._core.layout.make_way)

    def accumulate(self) -> Accumulating:
        """Backward inside this context is not the boundary: gradients add up and nothing is stepped yet."""
        return self._lasting.accumulation.context()

    def check_reads(self) -> CheckReads:
        """For debugging: in this context, a read or write of a parameter that is not delivered yet is a StateError.

        Views and other tensors that share memory with it included. Slow; NumPy arrays and compiled code go unseen.
        """
        return self._parts.delivery.check_reads()

    @property
    def max_grad_norm(self) -> float | None:
        """The threshold of the global gradient norm; what it is at ``step()`` counts."""
        return self._lasting.verdicts.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._lasting.verdicts.clip_to(value)
        self._lasting.say_whose_norm(self._ranks)

    @property
    def last_verdict(self) -> Verdict | None:
        """What the last ``step()`` decided; None before the first one."""
        return self._lasting.verdicts.last

    @property
    def grad_norm(self) -> float:
        """The global gradient norm of the last step, before clipping (inf when it was skipped)."""
        return self._lasting.verdicts.grad_norm

    @property
    def timeline(self) -> Timeline | None:
        """What records the steps if ``trace`` was given; its ``span("forward")`` adds parts of the training loop."""
        recorder = self._lasting.recorder
        return recorder if isinstance(recorder, Timeline) else None

    @property
    def placement(self) -> dict[str, Any] | None:
        """The part of the parameters whose state is to be on the accelerator, how many really are, and why so."""
        return self._parts.placement()

    def stats(self) -> dict[str, float | int]:
        """Totals since construction; superoffload/engine/stats.py explains each."""
        return self._core.stats()

    def state_digests(self) -> dict[str, str]:
        """SHA-256 of all masters, exp_avg, exp_avg_sq and published parameters, as after the last finished step."""
        self._check_usable(closed_too=True)
        return self._parts.state.digests()

    def synchronize(self) -> None:
        """Returns once nothing runs: masters and moments are those of the last finished step."""
        self._check_usable(closed_too=True)
        self._parts.state.quiesce()

    def refresh_written(self) -> None:
        """Takes over what was written to parameters, as every ``step()`` does."""
        self._parts.state.follow_written()
        self._parts.advice.tell()

    def refresh_masters(self) -> None:
        """Takes over parameters that were written by others, at once. ``step()`` does that by itself with writes that
        it notices: all that version counters show, those through ``param.data`` in host memory, and on a device those
        of the first steps and of every 16th (docs/edits.md)."""
        self._check_usable()
        self._parts.state.follow_parameters()

    @torch.no_grad()
    def load_masters(self, masters: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """Masters that keep the bits a model had before it was converted: float32 values by name, or in order.

        The parameters must be their rounding, as after ``model.bfloat16()``. Names are those of the model given as
        ``model=``, or of named parameters; names that are no parameters of the optimizer are left out of account.
        """
        self._check_usable()
        self._parts.state.load_masters(masters)

    def state_dict(self) -> StateDict:
        """``torch.optim.AdamW``'s layout plus ``master`` per parameter, as after the last finished step.

        A copy, in host memory: as many bytes again as ``exp_avg``, ``exp_avg_sq`` and masters have;
        ``superoffload.checkpoints.save`` needs none. DTensors for DTensor parameters. State that is spread over ranks
        (``replicated="shard"``) is gathered, so then all ranks must call this.
        """
        self._check_usable(closed_too=True)
        return self._parts.state.as_dict(super().state_dict)

    @torch.no_grad()
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads our own or ``torch.optim.AdamW``'s; all of it is checked before anything changes, on any rank.

        Where a checkpoint has no masters, or the model's parameters are not their rounding, the parameters win.
        Tensors of the parameters' full shapes fit any number of ranks. Values go into the state there is, block by
        block, so no memory is needed beside ``state_dict`` itself.
        """
        read = agreed(self._ranks, "load_state_dict()", lambda: self.check_state_dict(state_dict))
        self.take_over(read, "load_state_dict()")

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> ReadState:
        """What ``take_over`` takes; raises and changes nothing where it does not fit. For superoffload.checkpoints."""
        self._check_usable(to_load=True)
        return self._parts.state.check(state_dict)

    @torch.no_grad()
    def take_over(self, read: ReadState, what: str, rest: Callable[[], None] = lambda: None) -> None:
        """Puts checked state in the place of ours, then calls ``rest``, which loads what belongs to it; collectively.

        Where that fails on any rank, all of them refuse everything but another load. For superoffload.checkpoints.
        Signals and other threads wait, since what is loaded in part is of no use.
        """
        self._parts.state.take_over(read, what, rest)

    def begin_snapshot(self, snapshot: Snapshot) -> None:
        """From here on every shard is protected before it changes. For superoffload.checkpoints."""
        self._parts.state.begin_snapshot(snapshot)

    def await_snapshots(self) -> None:
        """Waits until earlier snapshots were read, signals let through. For superoffload.checkpoints."""
        self._parts.state.await_snapshots()

    def _check_usable(self, *, closed_too: bool = False, to_load: bool = False) -> None:
        self._lifetime.check_usable(closed_too=closed_too, to_load=to_load)
        if not self._lifetime.closed:
            self._follow_replaced()

    def close(self) -> None:
        """Takes back what was speculated and ends the worker threads. The state stays readable."""
        self._lifetime.close(self._core, lambda: self._parts.end(self._lasting))

    def __del__(self) -> None:
        if hasattr(self, "_parts") and self._lifetime.ends_with(self):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError("an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce_ex__(None)

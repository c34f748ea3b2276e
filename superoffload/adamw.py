"""``superoffload.AdamW``: a ``torch.optim.Optimizer`` whose state is in host memory and steps during backward.

This file: its arguments and what users ask for. Its layers are in ``superoffload/optimizer/``.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from superoffload import kernels  # obeys SUPEROFFLOAD_ISA
from superoffload.arguments import (
    as_groups,
    check_accumulate_dtype,
    check_delivery,
    check_groups,
    check_in_module,
    check_is_of,
    check_keep_grads,
    check_max_grad_norm,
    check_process_group,
    check_rank_check,
    check_replicated,
    check_seed,
    check_state_dtype,
    check_threads,
    check_whole_number,
    named_in,
)
from superoffload.engine.recorder import Recorder
from superoffload.environment import check_environment
from superoffload.errors import ArgumentError, StateError
from superoffload.gradient_source import clear_main_grad
from superoffload.optimizer.delivery import Delivery
from superoffload.optimizer.fp32_sums import check_fp32_sums
from superoffload.optimizer.parameters import Given
from superoffload.optimizer.weakly import weakly
from superoffload.optimizer.whose_norm import say_whose_norm
from superoffload.placement import check_placement
from superoffload.timeline import Timeline, record
from superoffload.unknown_arguments import refuse_unknown
from superoffload.verdict import Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from superoffload.unknown_arguments import TorchDefaults

__all__ = ["AdamW", "kernels"]


class AdamW(Delivery):
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

    _said_whose_norm = False

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
        refuse_unknown(AdamW, torchs)
        check_environment()
        self._max_grad_norm = check_max_grad_norm(max_grad_norm)
        asked = check_placement(placement)
        check_keep_grads(keep_grads)
        check_whole_number("bucket_numel", bucket_numel)
        check_process_group(process_group)
        check = check_rank_check(rank_check)
        replicated = check_replicated(replicated)
        check_delivery(delivery, module, model, replicated)
        model = module if module is not None else model
        check_threads("threads", threads)
        groups = as_groups(params)
        if not any(group["params"] for group in groups):  # one empty group among others is common: nothing to decay
            raise ArgumentError("params: only empty param groups; expected parameters to train")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_groups(groups, defaults)
        if delivery == "on_demand" and model is not None:
            check_in_module(model, [param for group in groups for param in group["params"]])
        elif model is not None:
            check_is_of(model, [param for group in groups for param in group["params"]])
        fp32_sums = check_accumulate_dtype(accumulate_dtype)
        if fp32_sums:
            check_fp32_sums(named_in(groups), model)
        about_ranks = (replicated, check, process_group, rank_timeout)
        reference = weakref.ref(model) if model is not None else None
        given = Given(
            speculation, delivery, bucket_numel, threads, *about_ranks, reference, keep_grads, asked, fp32_sums
        )
        self._begin()
        self._begin_with(given, check_state_dtype(state_dtype), check_seed(seed))
        self._recorder = record(trace) if trace is not None else Recorder()
        try:
            self._connect([entry[1] if isinstance(entry, tuple) else entry for g in groups for entry in g["params"]])
        except BaseException:
            self._recorder.close()
            raise
        try:
            super().__init__(groups, defaults)
            self._announce()
            self._follow_reductions(model)
            self._say_whose_norm()  # where warnings are errors, it raises
        except BaseException:
            self.close()
            raise
        self._constructing = False
        self._open()

    def _follow_reductions(self, model: nn.Module | None) -> None:
        """Among ranks, gradients of a ``DistributedDataParallel`` are final once it has reduced them."""
        if self._ranks.session is not None and model is not None:
            from superoffload.integrations.ddp import reduced_gradients

            alone = self._work.alone
            self._reduced = reduced_gradients(model, weakly(self._on_reduced), weakly(self._on_kept), alone)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. Without a ``step()`` since backward, the step is abandoned: nothing has changed."""
        if not self._out_of_use():
            with self._whole():
                if not self._out_of_use():  # since another thread had the lock
                    self._abandon()
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                clear_main_grad(param)
        if not self._out_of_use():
            with self._whole():
                if not self._out_of_use():
                    self._core.make_way()

    @property
    def max_grad_norm(self) -> float | None:
        """The threshold of the global gradient norm; what it is at ``step()`` counts."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = check_max_grad_norm(value)
        self._say_whose_norm()

    def _say_whose_norm(self) -> None:
        """Once, where other ranks clip by other norms."""
        if not self._said_whose_norm and self._ranks.first:
            self._said_whose_norm = say_whose_norm(self._max_grad_norm, self._ranks.sharing, self._ranks.world)

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
        return self._recorder if isinstance(self._recorder, Timeline) else None

    @property
    def placement(self) -> dict[str, Any] | None:
        """The part of the parameters whose state is to be on the accelerator, how many really are, and why so."""
        placer = self._core.placer
        if placer is None:
            return None
        found = self._core.stats()["params_on_device"]
        return {"gpu_fraction": placer.fraction, "params_on_device": found, "why": placer.why}

    def stats(self) -> dict[str, float | int]:
        """Totals since construction; superoffload/stats.py explains each."""
        return self._core.stats()

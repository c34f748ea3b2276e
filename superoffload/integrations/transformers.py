"""Adapts Hugging Face ``Trainer`` and its subclasses (TRL's too): call ``offload(trainer)`` before ``trainer.train()``.

Trainer clips between backward and ``step()``. Here clipping is part of the optimizer's verdict, so the step can run
during backward, and the norm is known after ``step()``, in time for Trainer's log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from superoffload.adamw import AdamW
from superoffload.errors import ArgumentError
from superoffload.metrics import PER_STEP, PREFIX, TOTALS, Monitor

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        "superoffload.integrations.transformers needs transformers >= 5.3: pip install 'superoffload[transformers]'"
    ) from error

# Figures that users can act upon, for every line of the log; docs/metrics.md says how.
LOGGED = (
    "clip_rate",
    "skipped_steps",
    "step_optimizer_seconds_exposed",
    "step_exposed_share",
    "step_speculated_share",
)
_KEPT = "superoffload"  # our key in Trainer's state
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_OURS_TO_SET = ("params", "model", "module", "max_grad_norm")


def offload(
    trainer: Trainer,
    *,
    metrics: bool | str | Iterable[str] = True,
    sleep: bool | None = None,
    **options: Any,
) -> Offload:
    """Makes ``trainer`` train with ``superoffload.AdamW``, set as its TrainingArguments say; returns its callback.

    Arguments:
        trainer: made, and not trained yet.
        metrics: which of the names in docs/metrics.md are added to Trainer's training logs, as ``superoffload/NAME``:
            True for a handful (``LOGGED``), "all", an iterable of names, or False for none. Counters go on when a run
            resumes from a checkpoint of Trainer.
        sleep: of TRL's trainers that generate (GRPO, RLOO): while they do, the optimizer sleeps (docs/rl.md).
        options: further arguments of ``superoffload.AdamW`` (speculation, threads, bucket_numel, ...). With
            delivery="on_demand", callbacks that read parameters call ``synchronize()`` of the optimizer first.
    """
    _check(trainer, options)
    names = names_of(metrics)
    if sleep not in (True, False, None):
        raise ArgumentError(f"sleep={sleep!r}: expected True or False; state stays in host memory")
    if sleep:
        _sleep_while_it_generates(trainer)
    args = trainer.args
    given: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm or None,
    }
    if options.get("delivery") == "on_demand":
        given["module"] = trainer.model
    callback = Offload(names)
    trainer.optimizer_cls_and_kwargs = (AdamW, {**given, **options})
    trainer._load_optimizer_and_scheduler = on_host(trainer._load_optimizer_and_scheduler)
    trainer._save_optimizer_and_scheduler = uncopied(trainer)
    trainer._clip_grad_norm = callback.norm_to_come
    trainer._get_grad_norm = callback.norm_to_come
    trainer.callback_handler.callbacks.insert(0, callback)  # before callbacks that report the log
    return callback


def _check(trainer: Any, options: dict[str, Any]) -> None:
    if not isinstance(trainer, Trainer):
        raise ArgumentError(f"trainer: {type(trainer).__name__}, expected a transformers.Trainer")
    if not (hasattr(trainer, "_clip_grad_norm") and hasattr(trainer, "_get_grad_norm")):
        raise ArgumentError("trainer: this transformers clips in a way that is not known here; expected version >= 5.3")
    if trainer.optimizer is not None:
        raise ArgumentError("trainer: it has an optimizer already; call offload() before train(), without optimizers=")
    if trainer.optimizer_cls_and_kwargs is not None:
        raise ArgumentError(
            f"trainer: optimizer_cls_and_kwargs has {trainer.optimizer_cls_and_kwargs[0].__name__}, expected None; "
            "call offload() once, on a trainer that was not given another optimizer"
        )
    if trainer.is_deepspeed_enabled:
        raise ArgumentError("trainer: it runs on DeepSpeed; use superoffload.integrations.deepspeed.enable() instead")
    name = getattr(trainer.args.optim, "value", trainer.args.optim)
    if name not in _ADAMW or trainer.args.optim_args:
        raise ArgumentError(f"trainer: optim={name!r}, optim_args={trainer.args.optim_args!r}: expected {_ADAMW[0]!r}")
    if options.get("replicated") == "shard":
        raise ArgumentError("replicated='shard': Trainer saves the state on the first rank alone; leave it out")
    for option in _OURS_TO_SET:
        if option in options:
            raise ArgumentError(f"{option}: set by Trainer; max_grad_norm belongs into TrainingArguments")


def on_host(load: Callable[..., None]) -> Callable[..., None]:
    """Has Trainer map checkpoints into host memory: it would read them whole, and onto each of several GPUs."""

    def load_on_host(*args: Any, **named: Any) -> None:
        stock, thread = torch.load, get_ident()

        def read(f: Any, map_location: Any = None, *rest: Any, **options: Any) -> Any:
            if get_ident() == thread:
                map_location, options["mmap"] = "cpu", isinstance(f, (str, PathLike))
            return stock(f, map_location, *rest, **options)

        torch.load = read
        try:
            load(*args, **named)
        finally:
            torch.load = stock

    return load_on_host


def uncopied(trainer: Any) -> Callable[..., None]:
    """Has Trainer write the state itself into its checkpoints, for whose copy there may be no memory."""
    save = trainer._save_optimizer_and_scheduler

    def save_uncopied(*args: Any, **named: Any) -> None:
        ours = optimizer_of(trainer.optimizer)
        vars(ours)["state_dict"] = partial(ours.state_dict, copy=False)
        try:
            save(*args, **named)
        finally:
            del vars(ours)["state_dict"]

    return save_uncopied


def _sleep_while_it_generates(trainer: Any) -> None:
    args = trainer.args
    generate = getattr(trainer, "_generate", None)
    if generate is None or not hasattr(args, "steps_per_generation"):
        raise ArgumentError(
            f"sleep: {type(trainer).__name__} does not generate, or not between two steps; expected a trainer like "
            "TRL's GRPOTrainer"
        )
    every = args.steps_per_generation * getattr(args, "num_iterations", 1)
    if every % args.gradient_accumulation_steps:
        raise ArgumentError(
            f"sleep: it generates every {every} micro-batches (steps_per_generation), also between two of one step, "
            f"expected a multiple of gradient_accumulation_steps, {args.gradient_accumulation_steps}"
        )

    def generate_asleep(*positional: Any, **named: Any) -> Any:
        if trainer.optimizer is None:  # an evaluation before train()
            return generate(*positional, **named)
        (optimizer := optimizer_of(trainer.optimizer)).sleep()
        try:
            return generate(*positional, **named)
        finally:
            optimizer.wake()

    trainer._generate = generate_asleep


def names_of(metrics: Any) -> frozenset[str]:
    """Resolves the names of the metrics to log."""
    if isinstance(metrics, bool):
        return frozenset(LOGGED if metrics else ())
    known = {*TOTALS, *PER_STEP}
    if metrics == "all":
        return frozenset(known)
    usable = isinstance(metrics, Iterable) and not isinstance(metrics, str)
    wrong = [name for name in metrics if name not in known] if usable else [metrics]
    if wrong:
        raise ArgumentError(f"metrics: {wrong[0]!r}, expected True, False, 'all' or a list out of {sorted(known)}")
    return frozenset(metrics)


class Offload(TrainerCallback):
    """Gives Trainer the verdict's norm, and our metrics to its logs.

    Trainer's state keeps the counters, and every checkpoint saves it.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._monitor: Monitor | None = None
        self._values: dict[str, float] = {}
        self._norm = torch.tensor(0.0, device="cpu")

    def norm_to_come(self, model: nn.Module, *args: Any, **options: Any) -> Tensor:
        """Replaces Trainer's clipping: clips nothing and returns a norm that ``step()`` fills in."""
        self._norm = torch.tensor(0.0, device="cpu")
        return self._norm

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        ours = optimizer_of(optimizer)
        self._monitor = Monitor(ours) if self._names else None
        if self._monitor is not None and _KEPT in state.stateful_callbacks:
            self._monitor.load_state_dict(state.stateful_callbacks[_KEPT])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        ours = optimizer_of(optimizer)
        if ours.last_verdict is not None:
            self._norm.fill_(ours.last_verdict.grad_norm)
        if self._monitor is not None:
            values = self._monitor.step()
            self._values = {key: value for key, value in values.items() if key.removeprefix(PREFIX) in self._names}
            state.stateful_callbacks[_KEPT] = self._monitor.state_dict()

    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        optimizer_of(optimizer).synchronize()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any) -> None:
        if logs is not None and "loss" in logs:  # not for the logs of an evaluation
            logs.update(self._values)
            state.log_history[-1].update(self._values)


def optimizer_of(optimizer: Any) -> AdamW:
    """Unwraps our optimizer from Accelerate's wrapper."""
    while not isinstance(optimizer, AdamW):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise ArgumentError(f"trainer: has {type(optimizer).__name__}, expected offload()'s AdamW; set no other")
        optimizer = inner
    return optimizer

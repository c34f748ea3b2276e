"""Adapts torchtitan: its Trainer trains with ``superoffload.AdamW`` after an override of its configuration.

On the command line: ``--override.imports superoffload.integrations.torchtitan.offload``. In a config_registry:
``config.optimizer = offload(config.optimizer)``. docs/frameworks.md#torchtitan has what is
kept, what is refused and an example.

torchtitan clips between backward and ``step()`` with ``torchtitan.distributed.utils.clip_grad_norm_``. Here clipping is
part of the optimizer's verdict, so that the step can run during backward, and gradients are not read again. So that
function is replaced: for the parameters of our optimizer it hands ``training.max_norm`` over, and returns a tensor that
has the norm after ``step()``, in time for torchtitan's log. Other parameters get the original function.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from superoffload.adamw import AdamW
from superoffload.distributed.ownership import like_parameter
from superoffload.errors import ArgumentError
from superoffload.host.tensors import local_of
from superoffload.metrics import Monitor

try:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.config.override import derive, override
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.trainer import Trainer as TitanTrainer
except ImportError as error:
    raise ImportError(
        f"superoffload.integrations.torchtitan needs torchtitan >= 0.3.0 and what it imports: {error}. torchtitan "
        "itself needs triton; docs/frameworks.md#torchtitan says how it runs without"
    ) from error

_IMPLEMENTATION = ("fused", "foreach")  # of torch's step; ours has one
_OF_GROUPS = ("lr", "betas", "eps", "weight_decay")
_OURS_TO_SET = ("params", "model", "module", "max_grad_norm")
_Factory = TypeVar("_Factory", bound=Callable[..., Any])


def _replacing(target: Any, description: str) -> Callable[[_Factory], _Factory]:
    """Registers a function as an override of torchtitan's configuration."""
    registered: Callable[[_Factory], _Factory] = override(target=target, description=description)
    return registered


class Optimizers(OptimizersContainer):
    """Holds one ``superoffload.AdamW`` over all parts of the model on this rank, with one verdict over all ranks.

    Its state dict has torchtitan's keys. For fp32 parameters it has the same entries too, so that checkpoints of
    torchtitan's own AdamW load here and ours load there. For bf16 parameters ``state.NAME.master`` is added.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        max_grad_norm: float | None = None
        """Norm to clip gradients to. None: training.max_norm. Otherwise training.max_norm must be inf or the same."""

        options: dict[str, Any] = field(default_factory=dict)
        """Further arguments of superoffload.AdamW (speculation, delivery, state_dtype, placement, ...)."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        options = _options_of(config)
        if options.get("delivery") == "on_demand" and len(model_parts) > 1:
            raise ArgumentError(
                f"options: delivery='on_demand' with {len(model_parts)} parts of the model on this rank, expected one; "
                "use delivery='eager' with an interleaved schedule"
            )
        groups = self._merged_groups(config, model_parts)
        whole = model_parts[0] if len(model_parts) == 1 else nn.ModuleList(model_parts)
        options["module" if options.get("delivery") == "on_demand" else "model"] = whole
        self._max_grad_norm = config.max_grad_norm
        self._norm: Tensor | None = None
        self._monitor: Monitor | None = None
        self.figures: dict[str, float] = {}
        self.model_parts = model_parts
        self.optimizers = [AdamW(groups, max_grad_norm=config.max_grad_norm, **options)]
        params = [param for group in groups for param in group["params"]]
        self._validate_params(params)
        self._post_init(params)  # the hooks of torch.optim.Optimizer, which MoE balancing uses
        self._owned = frozenset(map(id, params))
        _ClipByVerdict.serve(self)

    def _merged_groups(self, config: Config, model_parts: list[nn.Module]) -> list[dict[str, Any]]:
        """Returns one group per entry of ``param_groups``, with the parameters of all parts, so that all ranks have the
        same groups however many stages of a pipeline they have."""
        for given in config.param_groups:
            _check_kind(given)
        if config.optimizer_factory_kwargs_by_name:
            raise ArgumentError(
                f"optimizer_factory_kwargs_by_name: {sorted(config.optimizer_factory_kwargs_by_name)}, expected none; "
                "arguments of superoffload.AdamW are in options"
            )
        merged: list[dict[str, Any]] = []
        for part in model_parts:
            by_kind, _ = self._build_param_groups(part, config.param_groups, {})
            groups = [group for kind in by_kind.values() for group in kind]
            if not merged:
                merged = [{**group, "params": [], "param_names": []} for group in groups]
            for all_parts, group in zip(merged, groups, strict=True):
                all_parts["params"] += group["params"]
                all_parts["param_names"] += group["param_names"]
        return [{key: value for key, value in group.items() if key not in _IMPLEMENTATION} for group in merged]

    @property
    def adamw(self) -> AdamW:
        return self.optimizers[0]

    def owns(self, params: Iterable[Tensor]) -> bool:
        """Returns whether all of ``params`` that are trained are this optimizer's."""
        ids = {id(param) for param in params if param.requires_grad}
        return bool(ids) and ids <= self._owned

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Has the next ``step()`` clip; returns a tensor of one fp32 element, NaN until that step fills in the norm."""
        if norm_type != 2.0:
            raise ArgumentError(f"norm_type: {norm_type}, expected 2.0: superoffload.AdamW clips the 2-norm")
        if error_if_nonfinite:
            raise ArgumentError(
                "error_if_nonfinite: True, expected False: superoffload.AdamW skips a step whose gradients are not "
                "finite, and counts it in stats()['skipped_steps']"
            )
        self.adamw.max_grad_norm = self._threshold(float(max_norm))
        self._norm = torch.full((), math.nan, device="cpu")
        return self._norm

    def _threshold(self, max_norm: float) -> float | None:
        if not max_norm > 0.0:
            raise ArgumentError(f"training.max_norm: {max_norm}, expected a number above 0, or inf to clip nothing")
        own, theirs = self._max_grad_norm, None if math.isinf(max_norm) else max_norm
        if own is not None and theirs is not None and own != theirs:
            raise ArgumentError(
                f"training.max_norm: {theirs}, but max_grad_norm of the optimizer is {own}; set one of them, or "
                "training.max_norm to inf"
            )
        return theirs if own is None else own

    def watch(self) -> None:
        """Has each ``step()`` from now on renew ``figures``, the metrics of docs/metrics.md."""
        if self._monitor is None:
            self._monitor = Monitor(self.adamw)

    def step(self, closure: None = None) -> None:
        super().step(closure)
        norm, self._norm = self._norm, None
        if norm is not None and self.adamw.last_verdict is not None:
            norm.fill_(self.adamw.grad_norm)
        if self._monitor is not None:
            self.figures = self._monitor.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the state in host memory, flat and by names, as torchtitan's container does.

        A parameter that was never stepped has zeros and step 0, so that a checkpoint can be loaded before the first.
        """
        state, flat = self.adamw.state_dict(), {}
        index = 0
        for group, saved in zip(self.adamw.param_groups, state["param_groups"], strict=True):
            values = {key: value for key, value in saved.items() if key not in ("params", "param_names")}
            for name, param in zip(group["param_names"], group["params"], strict=True):
                own = _kept(param, state["state"].get(index) or self._unstepped(param))
                flat.update({f"state.{name}.{key}": value for key, value in own.items()})
                flat.update({f"param_groups.{name}.{key}": value for key, value in values.items()})
                index += 1
        return flat

    def _unstepped(self, param: Tensor) -> dict[str, Any]:
        values = local_of(param).detach().to(device="cpu", dtype=torch.float32).reshape(-1)
        flat = {"exp_avg": torch.zeros_like(values), "exp_avg_sq": torch.zeros_like(values), "master": values}
        holding = self.adamw.parts.params.holding_of(param)
        return {
            "step": torch.tensor(0.0, device="cpu"),
            **{key: like_parameter(param, holding, flat[key]) for key in flat},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the flat state of this class or of torchtitan's AdamW; raises with nothing changed if it misfits."""
        entries: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in state_dict.items():
            place, _, entry = key.rpartition(".")
            entries[place][entry] = value
        states: dict[int, dict[str, Any]] = {}
        groups = []
        for group in self.adamw.param_groups:
            names = group["param_names"]
            numbers = list(range(len(states), len(states) + len(names)))
            states.update(zip(numbers, (_state_of(name, entries) for name in names), strict=True))
            values = entries[f"param_groups.{names[0]}"] if names else group
            groups.append({**values, "param_names": names, "params": numbers})
        stepped = {number: state for number, state in states.items() if float(state["step"]) > 0}
        self.adamw.load_state_dict({"state": stepped, "param_groups": groups})


class Metrics(MetricsProcessor):
    """Adds the optimizer's figures of docs/metrics.md to torchtitan's metrics, as ``superoffload/NAME``."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def should_log(self, step: int) -> bool:
        """Is called before each step, logged or not; figures of single steps need all of them to be watched."""
        if not isinstance(self.optimizers, Optimizers):
            raise ArgumentError(
                f"metrics: the optimizer is torchtitan's {type(self.optimizers).__name__}, which has no such figures; "
                "add superoffload.integrations.torchtitan.offload to override.imports, or leave metrics out"
            )
        self.optimizers.watch()
        return bool(super().should_log(step))

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().log(*args, extra_metrics={**(extra_metrics or {}), **self.optimizers.figures}, **kwargs)


class Trainer(TitanTrainer):
    """Is torchtitan's Trainer, which says which backward is the last of a step that accumulates gradients.

    Without it such steps have the same bits, but the optimizer cannot step during the last backward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanTrainer.Config):
        pass

    _passes_left = 0

    def train_step(self, data_iterator: Any) -> None:
        self._passes_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **inputs: Any) -> Any:
        self._passes_left -= 1
        if self._passes_left == 0 or not isinstance(self.optimizers, Optimizers):
            return super().forward_backward_step(**inputs)
        with self.optimizers.adamw.accumulate():
            return super().forward_backward_step(**inputs)


@_replacing(OptimizersContainer.Config, "superoffload.AdamW: state in host memory")
def offload(config: Any, **options: Any) -> Any:
    """Returns torchtitan's configuration of optimizers with ``superoffload.AdamW`` in the place of AdamW.

    ``options``: ``max_grad_norm`` of ``Optimizers.Config``, and further arguments of ``superoffload.AdamW``.
    """
    given = {key: options.pop(key) for key in ("max_grad_norm",) if key in options}
    return derive(config, Optimizers.Config, options=options, **given)


@_replacing(MetricsProcessor.Config, "figures of superoffload in torchtitan's metrics")
def metrics(config: Any) -> Any:
    """Returns torchtitan's configuration of metrics with the optimizer's figures added."""
    return derive(config, Metrics.Config)


class _ClipByVerdict:
    """Stands in the place of torchtitan's ``clip_grad_norm_`` and serves the containers that are alive."""

    _containers: ClassVar[weakref.WeakSet[Optimizers]] = weakref.WeakSet()

    def __init__(self, original: Callable[..., Tensor]) -> None:
        functools.update_wrapper(self, original)
        self._original = original

    @classmethod
    def serve(cls, container: Optimizers) -> None:
        cls._containers.add(container)
        if not isinstance(titan_utils.clip_grad_norm_, cls):
            titan_utils.clip_grad_norm_ = cls(titan_utils.clip_grad_norm_)

    def __call__(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for container in self._containers:
            if container.owns(params):
                return container.clip(max_norm, norm_type, error_if_nonfinite)
        return self._original(params, max_norm, norm_type, error_if_nonfinite, *args, **kwargs)


def _options_of(config: Optimizers.Config) -> dict[str, Any]:
    options = dict(config.options)
    for name in options:
        if name in _OURS_TO_SET:
            raise ArgumentError(f"options: {name}={options[name]!r}, which the integration sets by itself")
        if name in _OF_GROUPS:
            raise ArgumentError(
                f"options: {name}={options[name]!r}, which torchtitan's groups decide; set it in optimizer_kwargs of "
                "optimizer.param_groups"
            )
    if config.implementation == "fused_opt_states_bf16":
        state_dtype = options.setdefault("state_dtype", "bf16")
        if state_dtype not in ("bf16", torch.bfloat16):
            raise ArgumentError(
                f"options: state_dtype={state_dtype!r}, but optimizer.implementation is 'fused_opt_states_bf16', which "
                "means 'bf16'; set implementation to 'fused' or leave state_dtype out"
            )
    return options


def _check_kind(given: Any) -> None:
    kind, decay = given.optimizer_name, given.optimizer_kwargs.get("weight_decay", 0.0)
    if kind == "AdamW" or (kind == "Adam" and decay == 0.0):
        return
    hint = "its weight_decay is an L2 penalty; use AdamW" if kind == "Adam" else "expected AdamW"
    raise ArgumentError(f"param_groups: optimizer_name={kind!r} for the pattern {given.pattern!r}; {hint}")


def _kept(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Leaves masters of fp32 parameters out: they are the parameters, which the model's own checkpoint has."""
    return {key: value for key, value in state.items() if key != "master" or param.dtype != torch.float32}


def _state_of(name: str, entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    state = entries.get(f"state.{name}", {})
    if "step" not in state:
        raise ArgumentError(f"state_dict: nothing under 'state.{name}.step'; is it of another model, or an older one?")
    return state

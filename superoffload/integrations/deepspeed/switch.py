"""``enable()`` and ``disable()`` replace parts of DeepSpeed, in the versions that we know.

This file loads neither DeepSpeed nor torch before ``enable()``: the doctor reads the versions without them.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any

from superoffload.errors import ArgumentError, StateError

OLDEST, NEWEST = (0, 18, 0), (0, 19, 8)

_replaced: list[tuple[Any, str, Any]] = []
_take_over = False  # also configs with DeepSpeed's own "device": "cpu"


def is_enabled() -> bool:
    """Tells whether DeepSpeed's ``offload_optimizer`` leads to us at present."""
    return bool(_replaced)


def enable(*, take_over: bool = False) -> None:
    """Makes ``"device": "superoffload"`` and ``"super_offload": true`` select our backend in this process.

    With ``take_over`` DeepSpeed's own ``"device": "cpu"`` selects it too, so that a config stays as it is. Call it
    before ``deepspeed.zero.Init`` and ``deepspeed.initialize``. Calling it again can only add ``take_over``.
    """
    global _take_over
    if not isinstance(take_over, bool):
        raise ArgumentError(f"enable(): take_over={take_over!r}: expected True or False")
    _take_over = _take_over or take_over
    if _replaced:
        return
    try:
        deepspeed = import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise
        raise ArgumentError(
            "superoffload.integrations.deepspeed.enable(): deepspeed is not installed; pip install "
            f"'deepspeed>={_text(OLDEST)},<={_text(NEWEST)}'"
        ) from None
    check_version(deepspeed.__version__)
    _refuse_engines()

    config = import_module("deepspeed.runtime.config")
    engine = import_module("deepspeed.runtime.engine")
    cpu_adam = import_module("deepspeed.ops.adam.cpu_adam")
    upstream = import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    stage3 = import_module("superoffload.integrations.deepspeed.zero.stage3")
    _replace(config.DeepSpeedConfig, "__init__", _reading_our_device(config.DeepSpeedConfig.__init__))
    _replace(cpu_adam, "CPUAdamBuilder", lazy_builder(cpu_adam.CPUAdamBuilder))
    _replace(upstream, "SuperOffloadOptimizer_Stage3", stage3.SpeculativeStage3)
    configure = engine.DeepSpeedEngine._configure_zero_optimizer
    _replace(engine.DeepSpeedEngine, "_configure_zero_optimizer", _choosing_our_class(configure, engine))
    for owner, name, replacement in replaced_clips():
        _replace(owner, name, replacement)


def disable() -> None:
    """Restores everything that ``enable()`` replaced. Existing engines keep their backend."""
    global _take_over
    _take_over = False
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def check_version(version: str) -> None:
    """Refuses unknown versions, since DeepSpeed's private names change between versions."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    if not OLDEST <= tuple(numbers) <= NEWEST:
        raise ArgumentError(
            f"deepspeed {version}: expected {_text(OLDEST)} to {_text(NEWEST)}, the versions this adapter was tested "
            f"with; pip install 'deepspeed>={_text(OLDEST)},<={_text(NEWEST)}'"
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refuse_engines() -> None:
    """Refuses existing engines that asked for super_offload: they have the other backend, and keep it."""
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    gc.collect()
    for alive in gc.get_objects():
        if issubclass(type(alive), engine) and hasattr(alive, "_config") and alive.super_offload():
            optimizer = getattr(alive, "optimizer", None)  # None: its initialize() raised, so it has no backend
            if optimizer is None or type(optimizer).__module__.startswith("superoffload."):
                continue
            raise StateError(
                "enable(): a DeepSpeed engine with super_offload exists already and keeps the optimizer that it has; "
                "call enable() before deepspeed.initialize(), or engine.destroy() and delete that engine first"
            )


def _replace(owner: Any, name: str, replacement: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)


def _reading_our_device(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps DeepSpeedConfig's constructor, so that it never meets a device that it does not know."""
    from superoffload.integrations.deepspeed.config import load, rewrite

    @functools.wraps(original)
    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        found = load(config)
        if found is not None:
            rewritten = rewrite(found, take_over=_take_over)
            config = config if rewritten is found else rewritten
        original(self, config, *args, **kwargs)

    return construct


def _choosing_our_class(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Wraps the method that makes DeepSpeed's ZeRO optimizers. For stages 1 and 2 it has no class for SuperOffload, and
    gives no config to the one that it makes."""

    @functools.wraps(original)
    def configure(self: Any, optimizer: Any) -> Any:
        if not (self.super_offload() and self.zero_optimization_stage() < 3):
            return original(self, optimizer)
        ours = import_module("superoffload.integrations.deepspeed.zero.stage1_and_2").SpeculativeStage1And2
        stock = module.DeepSpeedZeroOptimizer
        module.DeepSpeedZeroOptimizer = functools.partial(ours, ds_config=self.config)
        try:
            return original(self, optimizer)
        finally:
            module.DeepSpeedZeroOptimizer = stock

    return configure


# ---- DeepSpeedCPUAdam compiles its kernel at its first call, and our engine never calls it ---------------------------
# DeepSpeed compiles it when the optimizer is made. That fails without a compiler, and gives illegal instructions where
# machines share a build.


def lazy_builder(builder: Any) -> Any:
    """Makes a replacement for ``CPUAdamBuilder``, where DeepSpeedCPUAdam looks it up."""

    class LazyCPUAdamBuilder(builder):
        """Loads a kernel that is built on its first use."""

        def load(self, *args: Any, **kwargs: Any) -> Any:
            build = super().load
            return _LazyKernel(lambda: build(*args, **kwargs))

    return LazyCPUAdamBuilder


class _LazyKernel:
    def __init__(self, build: Any) -> None:
        self._build = build
        self._kernel: Any = None
        self._created: dict[int, tuple[Any, ...]] = {}

    def create_adam(self, key: int, *arguments: Any) -> None:
        """Remembers the call until the kernel is built."""
        if self._kernel is None:
            self._created[key] = arguments
        else:
            self._kernel.create_adam(key, *arguments)

    def destroy_adam(self, key: int) -> None:
        """Forgets a call that was only remembered."""
        if self._kernel is None:
            self._created.pop(key, None)
        else:
            self._kernel.destroy_adam(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._kernel is None:
            self._kernel = self._build()
            for key, arguments in self._created.items():
                self._kernel.create_adam(key, *arguments)
            self._created.clear()
        return getattr(self._kernel, name)


# ---- manual clipping is refused: under ZeRO gradients are not in p.grad, so it would clip nothing -------------------

_MARK = "superoffload_steps_it"  # marks parameters whose gradients our backend takes away during backward


def replaced_clips() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Lists (module, name, replacement) for torch's public names and for what clip_grad_norm_ itself calls."""
    import torch.nn.utils
    from torch.nn.utils import clip_grad

    found = []
    for module in (torch.nn.utils, clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_"):
            if hasattr(module, name):
                found.append((module, name, _refusing(getattr(module, name), name.strip("_") + "_")))
    return found


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    from torch import Tensor

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(hasattr(param, _MARK) and param.grad is None for param in params):
            raise StateError(
                f"{name}: under DeepSpeed ZeRO gradients are not in p.grad, so this would clip nothing; set "
                '"gradient_clipping" in the DeepSpeed JSON (Accelerate: accelerator.clip_grad_norm_)'
            )
        return original(params, *args, **kwargs)

    return clip

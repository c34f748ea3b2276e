"""``enable()`` and ``disable()`` replace parts of DeepSpeed, in the versions that we know."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from importlib import import_module
from typing import Any

from superoffload.errors import ArgumentError, StateError

OLDEST, NEWEST = (0, 18, 0), (0, 19, 8)

_replaced: list[tuple[Any, str, Any]] = []


def is_enabled() -> bool:
    """Tells whether DeepSpeed's ``offload_optimizer`` leads to us at present."""
    return bool(_replaced)


def enable() -> None:
    """Makes ``"device": "superoffload"`` and ``"super_offload": true`` select our backend in this process.

    Call it before ``deepspeed.zero.Init`` and ``deepspeed.initialize``. Calling it again changes nothing.
    """
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
    cpu_adam = import_module("deepspeed.ops.adam.cpu_adam")
    upstream = import_module("deepspeed.runtime.superoffload.superoffload_stage3")
    lazy_adam = import_module("superoffload.integrations.deepspeed.lazy_adam")
    stage3 = import_module("superoffload.integrations.deepspeed.stage3")
    _replace(config.DeepSpeedConfig, "__init__", _reading_our_device(config.DeepSpeedConfig.__init__))
    _replace(cpu_adam, "CPUAdamBuilder", lazy_adam.lazy_builder(cpu_adam.CPUAdamBuilder))
    _replace(upstream, "SuperOffloadOptimizer_Stage3", stage3.SpeculativeStage3)
    for owner, name, replacement in import_module("superoffload.integrations.deepspeed.clipping").replacements():
        _replace(owner, name, replacement)


def disable() -> None:
    """Restores everything that ``enable()`` replaced. Existing engines keep their backend."""
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
            rewritten = rewrite(found)
            config = config if rewritten is found else rewritten
        original(self, config, *args, **kwargs)

    return construct

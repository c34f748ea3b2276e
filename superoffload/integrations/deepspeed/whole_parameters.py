"""Brings the last step's values to readers of partitioned parameters before they gather one.

DeepSpeed keeps the functions that gather and partition a parameter on the parameter itself. Submodule fetches,
``GatheredParameters``, external parameters and checkpoints all call them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_WAITS_FOR_ALL = (0, 19, 8)


class Readers:
    """Wraps the gathering functions of every parameter of a module, and unwraps them in ``close()``."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        before_gather: Callable[[list[Any]], None] | None,
        after_update: Callable[[list[Any]], None],
    ) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        waits_for_last = gathers_wait_for_the_last_only()
        for parameter in parameters:
            if not hasattr(parameter, "ds_id"):
                continue
            if waits_for_last:
                self._wrap(parameter, "all_gather", _one_by_one(parameter, parameter.all_gather))
            if before_gather is not None:
                self._wrap(parameter, "all_gather", _gathering(parameter, parameter.all_gather, before_gather))
                coalesced = _gathering(parameter, parameter.all_gather_coalesced, before_gather)
                self._wrap(parameter, "all_gather_coalesced", coalesced)
            self._wrap(parameter, "partition", _updating(parameter, parameter.partition, after_update))

    def _wrap(self, parameter: Any, name: str, wrapper: Any) -> None:
        self._undo.append((parameter, name, getattr(parameter, name), wrapper))
        setattr(parameter, name, wrapper)

    def close(self) -> None:
        """Unwraps the functions, except those that other code has wrapped or replaced since."""
        for parameter, name, original, wrapper in reversed(self._undo):
            if getattr(parameter, name, None) is wrapper:
                setattr(parameter, name, original)
        self._undo.clear()


def gathers_wait_for_the_last_only() -> bool:
    """Tells whether a blocking gather of several parameters may return before all of them are complete.

    DeepSpeed before 0.19.8 waits for the last of its all-gathers. On a GPU the others end before it; gloo ends them in
    any order, and readers then meet undefined memory.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    version = tuple(int(part) for part in re.findall(r"\d+", deepspeed.__version__)[:3])
    return version < _WAITS_FOR_ALL and get_accelerator().device_name() == "cpu"


def _one_by_one(parameter: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def gather(param_list: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        chosen = [parameter] if param_list is None else list(param_list)
        if async_op or len(chosen) < 2:
            return original(chosen, async_op=async_op, **kwargs)
        for one in chosen:
            original([one], async_op=False, **kwargs)
        return None

    return gather


def gather_together(parameters: Iterable[Any]) -> None:
    """Gathers small parameters in one collective; DeepSpeed's blocking gather takes one for each. Collective."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    missing = [parameter for parameter in parameters if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE]
    if missing:
        missing[0].all_gather_coalesced(missing).wait()


@contextmanager
def whole_parameter(parameter: Any) -> Iterator[Tensor]:
    """Yields ``parameter`` as a forward reads it, gathered if necessary. Collective."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    if parameter.ds_status == ZeroParamStatus.AVAILABLE:
        yield parameter.detach()
        return
    with deepspeed.zero.GatheredParameters([parameter]):
        yield parameter.detach()


def _gathering(parameter: Any, original: Callable[..., Any], before: Callable[[list[Any]], None]) -> Callable[..., Any]:
    def gather(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        if "params" in kwargs:
            param_list = kwargs.pop("params")
        chosen = [parameter] if param_list is None else list(param_list)
        before(chosen)
        return original(chosen, *args, **kwargs)

    return gather


def _updating(parameter: Any, original: Callable[..., Any], after: Callable[[list[Any]], None]) -> Callable[..., Any]:
    def partition(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = [parameter] if param_list is None else list(param_list)
        result = original(chosen, *args, **kwargs)
        if kwargs.get("has_been_updated") or (len(args) > 1 and args[1]):
            after(chosen)
        return result

    return partition

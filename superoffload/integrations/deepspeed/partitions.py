"""Partitioned parameters: who reads them, and what their ranks exchange.

That is which processors they may use, a step's sums, and the values for the rank checks.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from superoffload.distributed.group import rank_group, rank_timeout
from superoffload.distributed.rank_checks import Held
from superoffload.distributed.session import Gathered, RankCheck, RankSession, near_gpu
from superoffload.host.processors import RankOnNode, allowed_cpus, is_crowded, share_cpus, worker_cpus

# ---- readers of partitioned parameters ------------------------------------------------------------------------------
# DeepSpeed keeps the functions that gather and partition a parameter on the parameter itself. Submodule fetches,
# ``GatheredParameters``, external parameters and checkpoints all call them. Readers get the last step's values first.

_WAITS_FOR_ALL = (0, 19, 8)


class Readers:
    """Wraps the gathering functions of every parameter of a module, and unwraps them in ``close()``."""

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        before_use: Callable[[list[Any]], None] | None,
        after_update: Callable[[list[Any]], None],
    ) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        waits_for_last = gathers_wait_for_the_last_only()
        for parameter in parameters:
            if not hasattr(parameter, "ds_id"):
                continue
            if waits_for_last:
                self._wrap(parameter, "all_gather", _one_by_one(parameter, parameter.all_gather))
            if before_use is not None:
                self._wrap(parameter, "all_gather", _gathering(parameter, parameter.all_gather, before_use))
                coalesced = _gathering(parameter, parameter.all_gather_coalesced, before_use)
                self._wrap(parameter, "all_gather_coalesced", coalesced)
            self._wrap(parameter, "partition", _updating(parameter, parameter.partition, before_use, after_update))

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


def _updating(
    parameter: Any,
    original: Callable[..., Any],
    before: Callable[[list[Any]], None] | None,
    after: Callable[[list[Any]], None],
) -> Callable[..., Any]:
    def partition(param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = [parameter] if param_list is None else list(param_list)
        updated = kwargs.get("has_been_updated") or (len(args) > 1 and args[1])
        if updated and before is not None:
            before(chosen)
        result = original(chosen, *args, **kwargs)
        if updated:
            after(chosen)
        return result

    return partition


# ---- the ranks ------------------------------------------------------------------------------------------------------


def cpus_of_this_rank(
    threads: int | None, published: Sequence[Tensor], group: Any, timeout: float | None
) -> tuple[list[int], bool]:
    """Returns a processor per worker thread; ranks of one host share the processors that they may use. Collective.

    Also tells, alike on all ranks, whether a host has more ranks than processors. ``published``: tensors on the
    parameters' device, near which the processors should be.
    """
    mine = RankOnNode(socket.gethostname(), dist.get_rank(), tuple(allowed_cpus()), near_gpu(published))
    own_group = rank_group(group, rank_timeout(timeout))
    all_ranks = [mine] if own_group is None else own_group.exchange_objects("the processors of each rank", mine)
    beside_device = any(each.device.type != "cpu" for each in published)
    cpus = worker_cpus(threads, share_cpus(all_ranks, mine.rank), beside_device=beside_device)
    return cpus, is_crowded(all_ranks)


def open_session(
    held: Sequence[Held], gathered: Gathered | None, check: tuple[bool, int], group: Any, timeout: float | None
) -> RankSession | None:
    """Opens the exchange of verdicts and the rank checks over the ranks of ``group``; None if this rank is alone.

    ``timeout``: seconds until a rank that does not answer is lost; None: as the environment says.

    ``held``: the parameters, in the order that all ranks have. ``gathered``: see ``RankSession``. Collective.
    """
    own_group = rank_group(group, rank_timeout(timeout))
    if own_group is None:
        return None
    session = RankSession(own_group, RankCheck(*check), gathered)
    session.add(held)
    return session

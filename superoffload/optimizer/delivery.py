"""Parameters are delivered eagerly, or on demand: then ``step()`` returns at once and readers wait for what they read.

Known readers are forward passes of the module, its ``state_dict()`` and loading into it (module_hooks.py). All other
code must call ``synchronize()`` before it reads or writes parameters; ``check_reads()`` finds code that does not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.errors import StateError, SuperOffloadError
from superoffload.host.tensors import local_of
from superoffload.optimizer.arguments import check_in_module
from superoffload.optimizer.lifetime import Lifetime, weakly
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.module_hooks import ModuleHooks
from superoffload.optimizer.params import Params
from superoffload.optimizer.tracked_param import TrackedParam, find_edits, remember, unwritten

# These use a tensor's shape, dtype and device, not its values.
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_NEW = {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}


# ---- check_reads() --------------------------------------------------------------------------------------------------


class CheckReads(TorchDispatchMode):
    """Raises when an operation uses a tensor of ``undelivered()``, which returns names and values."""

    def __init__(self, undelivered: Callable[[], Sequence[tuple[str, Tensor]]]) -> None:
        super().__init__()
        self._undelivered = undelivered

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (func.is_view or func.overloadpacket.__name__ in _LIKE | _NEW):
            undelivered = self._undelivered()
            if undelivered:
                self._check(func, undelivered, tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _check(self, func: Any, undelivered: Sequence[tuple[str, Tensor]], leaves: Sequence[Any]) -> None:
        used = [extent for extent in map(_extent, leaves) if extent is not None]
        for name, value in undelivered:
            mine = _extent(value)
            if mine is not None and any(begin < mine[1] and mine[0] < end for begin, end in used):
                raise StateError(
                    f"{name}: {func.overloadpacket} uses it before its value of the last step was delivered; call "
                    "synchronize() before parameters are read or written outside of the module's own forward passes"
                )


def _extent(leaf: Any) -> tuple[int, int] | None:
    """Returns the address of a tensor's first byte and the one behind its last byte; None where it has no memory."""
    if not isinstance(leaf, Tensor):
        return None
    tensor = local_of(leaf)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    try:
        begin = tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


# ---- delivery -------------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Undelivered:
    """Knows which parameters must not be read yet; the thread that delivers them may."""

    _lifetime: Lifetime
    _engine: Engine
    _delivering: int | None = None  # the delivering thread

    def begin(self) -> None:
        """Notes that this thread delivers parameters."""
        self._delivering = threading.get_ident()

    def end(self) -> None:
        self._delivering = None

    @contextmanager
    def delivering(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def must_wait(self) -> bool:
        """Returns whether this thread must wait before it reads a parameter."""
        if not self._engine.last_step.is_landing or self._lifetime.closed:
            return False
        return self._delivering != threading.get_ident()

    def values(self) -> list[tuple[str, Tensor]]:
        """Returns names and values of the parameters that must not be read now."""
        if not self.must_wait():
            return []
        return [(shard.name, shard.target()) for shard in self._engine.last_step.landing_shards().values()]


class Delivery:
    """Gives parameters their new values by the end of ``step()``."""

    later = False  # than the end of step()

    def __init__(self, lifetime: Lifetime, engine: Engine) -> None:
        self._lifetime = lifetime
        self._engine = engine
        self._undelivered = Undelivered(lifetime, engine)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Returns a context in which the engine acts on a verdict, and in which this thread may write parameters."""
        with self._undelivered.delivering():
            yield

    def check_new(self, params: Any) -> None:
        """Raises where new parameters could never be delivered."""

    def check_reads(self) -> CheckReads:
        """Returns a context in which reads and writes of undelivered parameters are errors."""
        return CheckReads(self._undelivered.values)

    def remove_hooks(self) -> None: ...


class OnDemand(Delivery):
    """Delivers each parameter before its first use: the module's readers wait for it."""

    later = True

    def __init__(
        self,
        lifetime: Lifetime,
        engine: Engine,
        params: Params,
        master_updates: MasterUpdates,
        module_of: Callable[[], nn.Module | None],
        given: Sequence[Tensor],
    ) -> None:
        super().__init__(lifetime, engine)
        self._params = params
        self._master_updates = master_updates
        self._overtaken: dict[int, TrackedParam] = {}
        self._module_of = module_of  # returns None once the module is freed
        self._hooks: list[ModuleHooks] = []
        self.check_new(given)
        module = module_of()
        if module is not None:
            self._hooks.append(ModuleHooks(module, weakly(self.wait)))

    def check_new(self, params: Any) -> None:
        module = self._module_of()
        if module is not None:
            check_in_module(module, params)

    def remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    # ---- readers ----------------------------------------------------------------------------------------------

    def wait(self, params: Iterable[Tensor] | None, streams: Sequence[int]) -> None:
        """Delivers ``params``, or all, before they are read; ``streams`` read them besides the current one."""
        if not self._undelivered.must_wait():
            return
        shards = None
        if params is not None:
            found = map(self._params.get, params)
            shards = [tracked.shard for tracked in found if tracked is not None]
            if not self._engine.last_step.is_landing_any(shards):
                return
        if self._lifetime.work.forked:
            raise StateError(
                "this process was forked while parameters of the last step were not delivered yet, and its copy of "
                "them is old; call synchronize() before fork()"
            )
        with torch.inference_mode(False), torch.no_grad(), self._lifetime.whole():
            self._lifetime.check_usable(closed_too=True)
            for stream in streams:
                self._engine.link.read_on(stream)
            self._engine.last_step.land(shards)

    # ---- the step ---------------------------------------------------------------------------------------------

    @contextmanager
    def acting(self) -> Iterator[None]:
        for hooks in self._hooks:
            hooks.stepped()
        with super().acting():
            yield

    def landing(self, buckets: Sequence[Bucket]) -> None:
        """Finds parameters that the user wrote meanwhile; where possible their pieces are not delivered."""
        self._undelivered.begin()
        self._overtaken = {}
        # While new values travel, bits show nothing, and this stream must not read them.
        under_way = self._engine.link.asynchronous
        landing = self._stepped_in(buckets)
        overtaken = (
            [one for one in landing if one.plainly_written] if under_way else find_edits(unwritten(landing)[1]).written
        )
        self._overtaken = {tracked.shard.index: tracked for tracked in overtaken}
        if self._overtaken and not under_way:  # else step() has sent them already
            for bucket in buckets:
                bucket.leave_out(self._overtaken)

    def landed(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        self._undelivered.end()
        remember(self._stepped_in(buckets), on_device=self._master_updates.compares_on_device)
        errors = [self._overtaken_error(tracked) for tracked in self._overtaken.values()]
        return errors[0] if errors else None

    def _stepped_in(self, buckets: Sequence[Bucket]) -> list[TrackedParam]:
        return self._params.of_shards({piece.shard.index for bucket in buckets for piece in bucket.stepped_pieces()})

    def _overtaken_error(self, tracked: TrackedParam) -> SuperOffloadError:
        """Returns an error about a parameter, once: from now on its value counts as the user's."""
        tracked.forget_value()
        try:
            tracked.check_still_fits()
        except SuperOffloadError as misfit:
            return misfit
        fate = "is kept and counts from the next step on"
        if self._engine.link.asynchronous:
            fate = "may have been overwritten by it"
        return StateError(
            f"{tracked.shard.name}: written after step(), before the value of that step was delivered. The written "
            f"value {fate}; with delivery='on_demand' call synchronize() before parameters are written "
            "(docs/pipeline.md)"
        )

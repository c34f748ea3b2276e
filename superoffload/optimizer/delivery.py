"""Parameters are delivered eagerly, or on demand: then ``step()`` returns at once and readers wait for what they read.

Known readers are forward passes of the module, its ``state_dict()`` and loading into it: hooks on modules wait before
they begin. torch.compile sees these hooks and leaves them out of its graphs; they warn where code is traced. All other
code must call ``synchronize()`` before it reads or writes parameters; ``check_reads()`` finds code that does not.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, _dynamo, jit, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from superoffload.engine.bucket import Bucket
from superoffload.engine.engine import Engine
from superoffload.engine.verdict import Verdict
from superoffload.errors import StateError, SuperOffloadError, warn
from superoffload.host.tensors import is_dtensor, local_of
from superoffload.optimizer.arguments import check_in_module
from superoffload.optimizer.frameworks import Handle, gathering
from superoffload.optimizer.lifetime import Lifetime, weakly
from superoffload.optimizer.master_updates import MasterUpdates
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


# These read the parameters of their children without calling them.
_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


# ---- the modules that read a parameter ------------------------------------------------------------------------------
# The module that owns a parameter reads it when its forward begins. A module without a forward (a ParameterList) is
# read by the module above it. An all-gather (of FSDP2), compiled code and torch's fused attention read the parameters
# of all modules below, and so wait for them.


@dataclass(eq=False)
class Reader:
    """Describes a module whose forward begins only once ``params``, by id, are delivered.

    ``unit``: of the module above whose compiled code it is a part of. ``has_waited``: all of them were delivered since
    the last step.
    """

    module: nn.Module
    params: dict[int, Tensor] = field(default_factory=dict)
    unit: Reader | None = None
    has_waited: bool = True

    def inline(self, unit: Reader) -> None:
        self.unit = unit

    def waited(self) -> None:
        self.has_waited = True

    def stepped(self) -> None:
        self.has_waited = False

    def add(self, params: Iterable[Tensor]) -> None:
        self.params.update((id(param), param) for param in params)


def readers_of(module: nn.Module) -> list[Reader]:
    """Returns the readers of ``module``'s parameters, outer ones first, with all modules that gather parameters."""
    found: dict[nn.Module, Reader] = {}

    def reader_of(module: nn.Module) -> Reader:
        return found.setdefault(module, Reader(module))

    for at, above, unit in _walk(module, None, None, set()):
        reader = reader_of(at if above is None or _has_forward(at) else above)
        params = list(at.parameters(recurse=isinstance(at, _READ_BELOW)))
        if unit is not None and gathering(unit):
            reader_of(unit).add(param for param in params if is_dtensor(param))
            params = [param for param in params if not is_dtensor(param)]
        elif unit is not None and unit is not reader.module:
            reader_of(unit).add(params)
            reader.inline(reader_of(unit))
        reader.add(params)
    return [reader for reader in found.values() if reader.params or gathering(reader.module)]


def is_compiled(module: nn.Module) -> bool:
    """Returns whether ``torch.compile(module)`` or ``module.compile()`` was used."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # some builds of torch have no Dynamo
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _walk(
    at: nn.Module, above: nn.Module | None, unit: nn.Module | None, seen: set[tuple[int, int, int]]
) -> Iterator[tuple[nn.Module, nn.Module | None, nn.Module | None]]:
    """Yields (module, the next one above with a forward, the module, itself or above, that reads for all below it).

    Leaves out what torch.jit made, which has no parameter that trains and takes no hooks.
    """
    if isinstance(at, torch.jit.ScriptModule):
        return
    if gathering(at) or (unit is None and is_compiled(at)):
        unit = at
    key = id(at), id(above), id(unit)
    if key in seen:
        return
    seen.add(key)
    yield at, above, unit
    below = at if above is None or _has_forward(at) else above
    for child in at.children():
        yield from _walk(child, below, unit, seen)


# ---- hooks of the readers -------------------------------------------------------------------------------------------

_Function = TypeVar("_Function", bound=Callable[..., Any])

_COMPILE_FIRST = (
    "AdamW(delivery='on_demand') waits for the parameters of a module here; for a whole graph, compile the module "
    "before you make the optimizer and pass what torch.compile() returned as module=, export with strict=False, or use "
    "delivery='eager'"
)
_TRACED = (
    "what is traced or exported from a module with delivery='on_demand' does not wait for parameters. "
    "While you train, call optimizer.synchronize() before you call it"
)
_is_tracing = cast(Callable[[], bool], vars(jit)["is_tracing"])  # public, but torch's types do not list it
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)  # torch 2.6 has but the second


def have_hooks_guarded() -> None:
    """Has torch.compile look for hooks before it runs code that it compiled for a module without them.

    By default it does not (``skip_nnmodule_hook_guards``): what was compiled before, or for another module of the same
    class, would read parameters that have not arrived. The setting is of the caller's context (contextvars).
    """
    if not getattr(_dynamo.config, "skip_nnmodule_hook_guards", False):
        return
    _dynamo.config.skip_nnmodule_hook_guards = False
    _dynamo.reset()  # the code that there is has no such guards


def out_of_graphs(function: _Function) -> _Function:
    """Breaks graphs of torch.compile at ``function``, and tells why where they must not break."""
    known = inspect.signature(torch.compiler.disable).parameters  # torch 2.6 takes no reason
    reason = {"reason": _COMPILE_FIRST} if "reason" in known else {}
    return cast(_Function, torch.compiler.disable(function, **reason))


def warn_where_traced() -> None:
    """Warns where torch.jit.trace or torch.export records what calls this."""
    if _is_tracing() or _is_exporting():
        warn(_TRACED)


class Wait(Protocol):
    """Waits for these parameters, or all (None), before they are read; ``streams`` read besides the current one."""

    def __call__(self, params: Iterable[Tensor] | None, streams: Sequence[int] = (), /) -> None: ...


class ModuleHooks:
    """Calls ``wait(params)`` before a module reads them, and ``wait(None)`` before all are read or written."""

    def __init__(self, module: nn.Module, wait: Wait) -> None:
        self._handles: list[Handle] = []
        have_hooks_guarded()
        readers = {reader.module: reader for reader in readers_of(module)}
        self._units = {reader.unit for reader in readers.values() if reader.unit is not None}
        for reader in readers.values():
            hook = _BeforeForward(wait, reader, readers)
            first = hook if reader.unit is None else _BeforeInlined(hook, reader.unit)
            self._handles.append(reader.module.register_forward_pre_hook(first, prepend=True))
            if hook.gathering is not None:
                self._handles.append(hook.gathering.call_before(hook.wait))
        everything = _BeforeState(wait)
        for each in module.modules():
            if isinstance(each, torch.jit.ScriptModule):
                continue
            self._handles.append(each.register_state_dict_pre_hook(everything))
            self._handles.append(each.register_load_state_dict_pre_hook(everything))

    def stepped(self) -> None:
        """Notes that parameters will be delivered later."""
        have_hooks_guarded()  # the program may be in another context now
        for unit in self._units:
            unit.stepped()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _NotScripted(AttributeError):
    """Tells torch.jit.script, the one that asks for a hook's name, what works."""

    def __init__(self) -> None:
        super().__init__(
            "torch.jit.script compiles hooks, and those of superoffload.AdamW(delivery='on_demand'), which wait for "
            "parameters, cannot be compiled (a copy of the module has them, too). Script the module before you make "
            "the optimizer, or load model.state_dict() into a new one and script that"
        )


class _Hook:
    """Does nothing in a copy of the module, pickled ones included, since a copy has other parameters."""

    _wait: Wait | None = None

    @property
    def __name__(self) -> str:
        raise _NotScripted

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()

    def __call__(self, *args: Any) -> None: ...


class _BeforeForward(_Hook):
    def __init__(self, wait: Wait, reader: Reader, readers: dict[nn.Module, Reader]) -> None:
        self._wait = wait
        self._reader = reader
        self._readers = readers
        self._params = list(reader.params.values())
        self.gathering = gathering(reader.module)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            self.wait()
        else:  # code that torch.compile must leave out takes microseconds to enter
            self._wait_for_all()

    @out_of_graphs  # the state of FSDP2 is in a dictionary of weak references, which may change during tracing
    def wait(self) -> None:
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        warn_where_traced()
        self._land()
        self._reader.waited()

    def _land(self) -> None:
        assert self._wait is not None
        if self.gathering is None:
            self._wait(self._params)
            return
        together, streams = self.gathering.together(), self.gathering.streams()
        if together is None:
            self._wait(None, streams)
            return
        readers = [self._reader, *(self._readers[module] for module in together if module in self._readers)]
        self._wait([param for reader in readers for param in reader.params.values()], streams)


class _BeforeInlined(_Hook):
    """Leaves waiting to the compiled module above, whose graph this module is a part of, once that has waited.

    Dynamo guards what it reads here. So a graph that was entered otherwise, as that of a function that calls this
    module, is another one, in which this hook waits.
    """

    def __init__(self, hook: _BeforeForward, unit: Reader) -> None:
        self._hook = hook
        self._unit = unit

    def __call__(self, *args: Any) -> None:
        if not (torch.compiler.is_compiling() and self._unit.has_waited):
            self._hook()


class _BeforeState(_Hook):
    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    @out_of_graphs
    def __call__(self, *args: Any) -> None:
        assert self._wait is not None
        self._wait(None)


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

    def __init__(self, lifetime: Lifetime, engine: Engine) -> None:
        self._lifetime = lifetime
        self._engine = engine
        self._undelivered = Undelivered(lifetime, engine)

    def apply(self, verdict: Verdict) -> None:
        """Has the engine act on the verdict."""
        with self._undelivered.delivering():
            self._engine.apply(verdict, later=False)

    def check_new(self, params: Any) -> None:
        """Raises where new parameters could never be delivered."""

    def check_reads(self) -> CheckReads:
        """Returns a context in which reads and writes of undelivered parameters are errors."""
        return CheckReads(self._undelivered.values)

    def remove_hooks(self) -> None: ...


class OnDemand(Delivery):
    """Delivers each parameter before its first use: the module's readers wait for it."""

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

    def wait(self, params: Iterable[Tensor] | None, streams: Sequence[int] = ()) -> None:
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

    def apply(self, verdict: Verdict) -> None:
        for hooks in self._hooks:
            hooks.stepped()
        with self._undelivered.delivering():
            self._engine.apply(verdict, later=True)

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

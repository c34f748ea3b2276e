"""Hooks on a module and its submodules wait for parameters before forward, ``state_dict()`` and loading begin.

torch.compile sees them and leaves them out of its graphs; they warn where code is traced.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, _dynamo, jit, nn

from superoffload.distributed.fully_shard import UnshardHook, gathered_with, gathering_streams, is_sharded_module
from superoffload.optimizer.module_readers import Reader, readers_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_COMPILE_FIRST = (
    "AdamW(delivery='on_demand') waits for the parameters of a module here; for a whole graph, compile the module "
    "before you make the optimizer and pass what torch.compile() returned as module=, export with strict=False, or use "
    "delivery='eager'"
)
_TRACED = (
    "superoffload: what is traced or exported from a module with delivery='on_demand' does not wait for parameters. "
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
        warnings.warn(_TRACED, RuntimeWarning, stacklevel=2)


class Wait(Protocol):
    """Waits for these parameters, or all (None), before they are read; ``streams`` read besides the current one."""

    def __call__(self, params: Iterable[Tensor] | None, streams: Sequence[int] = (), /) -> None: ...


class _Handle(Protocol):
    def remove(self) -> None: ...


class ModuleHooks:
    """Calls ``wait(params)`` before a module reads them, and ``wait(None)`` before all are read or written."""

    def __init__(self, module: nn.Module, wait: Wait) -> None:
        self._handles: list[_Handle] = []
        have_hooks_guarded()
        readers = {reader.module: reader for reader in readers_of(module)}
        self._units = {reader.unit for reader in readers.values() if reader.unit is not None}
        for reader in readers.values():
            hook = _BeforeForward(wait, reader, readers)
            first = hook if reader.unit is None else _BeforeInlined(hook, reader.unit)
            self._handles.append(reader.module.register_forward_pre_hook(first, prepend=True))
            if is_sharded_module(reader.module):
                self._handles.append(UnshardHook(reader.module, hook.wait))
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
        self._sharded = is_sharded_module(reader.module)

    @out_of_graphs
    def __call__(self, *args: Any) -> None:
        warn_where_traced()
        self._wait_for_all()

    @out_of_graphs  # FSDP2 keeps its state in a dictionary of weak references, which may change during tracing
    def wait(self) -> None:
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        self._land()
        self._reader.waited()

    def _land(self) -> None:
        assert self._wait is not None
        if not self._sharded:
            self._wait(self._params)
            return
        together = gathered_with(self._reader.module)
        streams = gathering_streams(self._reader.module)
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

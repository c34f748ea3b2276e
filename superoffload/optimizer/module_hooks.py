"""Finds the modules that read parameters; hooks on them wait until these are delivered, before they begin.

torch.compile sees these hooks and leaves them out of its graphs; they warn where code is traced.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, _dynamo, jit, nn

from superoffload.errors import warn
from superoffload.host.tensors import is_dtensor
from superoffload.optimizer.frameworks import Handle, gathering

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
            reader.unit = reader_of(unit)
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


# Waits for these parameters, or all (None), before they are read; the streams read besides the current one.
Wait = Callable[[Iterable[Tensor] | None, Sequence[int]], None]


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
            unit.has_waited = False

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


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
        assert self._wait is not None
        if _is_tracing() or _is_exporting():
            warn(_TRACED)
        if self.gathering is None:
            self._wait(self._params, ())
        else:
            together = self.gathering.together()
            self._wait(None if together is None else self._params_of(together), self.gathering.streams())
        self._reader.has_waited = True

    def _params_of(self, modules: Iterable[nn.Module]) -> list[Tensor]:
        readers = [self._reader, *(self._readers[module] for module in modules if module in self._readers)]
        return [param for reader in readers for param in reader.params.values()]


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
        self._wait(None, ())

"""Hooks on a module and its submodules wait for parameters before forward, ``state_dict()`` and loading begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superoffload.distributed.fully_shard import UnshardHook, gathered_with, gathering_streams, is_sharded_module
from superoffload.optimizer.module_readers import Reader, readers_of
from superoffload.optimizer.untraced import untraced


class Wait(Protocol):
    """Waits for these parameters, or all (None), before they are read; ``streams`` read besides the current one."""

    def __call__(self, params: Iterable[Tensor] | None, streams: Sequence[int] = (), /) -> None: ...


class _Handle(Protocol):
    def remove(self) -> None: ...


class ModuleHooks:
    """Calls ``wait(params)`` before a module reads them, and ``wait(None)`` before all are read or written."""

    def __init__(self, module: nn.Module, wait: Wait) -> None:
        self._handles: list[_Handle] = []
        readers = {reader.module: reader for reader in readers_of(module)}
        for reader in readers.values():
            hook = _BeforeForward(wait, reader, readers)
            self._handles.append(reader.module.register_forward_pre_hook(hook, prepend=True))
            if is_sharded_module(reader.module):
                self._handles.append(UnshardHook(reader.module, hook.wait))
        everything = _BeforeState(wait)
        for each in module.modules():
            self._handles.append(each.register_state_dict_pre_hook(everything))
            self._handles.append(each.register_load_state_dict_pre_hook(everything))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    """Does nothing in a copy of the module, pickled ones included, since a copy has other parameters."""

    _wait: Wait | None = None

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
        self._inlined = reader.inlined
        self._sharded = is_sharded_module(reader.module)

    def __call__(self, *args: Any) -> None:
        if self._inlined and torch.compiler.is_compiling():
            return
        self.wait()

    @untraced  # FSDP2 keeps its state in a dictionary of weak references, which may change during tracing
    def wait(self) -> None:
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


class _BeforeState(_Hook):
    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    @untraced
    def __call__(self, *args: Any) -> None:
        assert self._wait is not None
        self._wait(None)

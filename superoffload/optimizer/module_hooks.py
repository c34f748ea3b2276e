"""Hooks on a module and all below it: what must wait is told before its forward, ``state_dict()`` and loading begin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from superoffload.optimizer.untraced import untraced
from superoffload.ranks.fully_shard import UnshardHook, gathered_with, gathering_streams, is_sharded_module
from superoffload.readers import Reader, readers_of


class Wait(Protocol):
    """Waits before these parameters, or (None) all of them, are read; ``streams``: on which besides the current one."""

    def __call__(self, params: Iterable[Tensor] | None, streams: Sequence[int] = (), /) -> None: ...


class _Handle(Protocol):
    def remove(self) -> None: ...


class ModuleHooks:
    """``wait(params)`` is called before something reads them; ``wait(None)`` before something reads or writes all."""

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
    """In a copy of the module, or where it was pickled, it does nothing: there the parameters are others."""

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

    @untraced  # FSDP2 keeps its state in a dictionary of weak references, which may change while that is traced
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

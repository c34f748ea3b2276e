"""The modules that read a parameter are found here; with on-demand delivery their forward waits for it.

The module that owns a parameter reads it when its forward begins. A module without a forward (a ParameterList) is read
by the module above it. An all-gather of FSDP2, compiled code and torch's fused attention read the parameters of all
modules below, and so wait for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from superoffload.distributed.fully_shard import is_sharded_module
from superoffload.host.tensors import is_dtensor

# These read the parameters of their children without calling them.
_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


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
    """Returns the readers of ``module``'s parameters, outer ones first, with all modules that FSDP2 gathers for."""
    found: dict[nn.Module, Reader] = {}

    def reader_of(module: nn.Module) -> Reader:
        return found.setdefault(module, Reader(module))

    for at, above, unit in _walk(module, None, None, set()):
        reader = reader_of(at if above is None or _has_forward(at) else above)
        params = list(at.parameters(recurse=isinstance(at, _READ_BELOW)))
        if unit is not None and is_sharded_module(unit):
            reader_of(unit).add(param for param in params if is_dtensor(param))
            params = [param for param in params if not is_dtensor(param)]
        elif unit is not None and unit is not reader.module:
            reader_of(unit).add(params)
            reader.inline(reader_of(unit))
        reader.add(params)
    return [reader for reader in found.values() if reader.params or is_sharded_module(reader.module)]


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
    if is_sharded_module(at) or (unit is None and is_compiled(at)):
        unit = at
    key = id(at), id(above), id(unit)
    if key in seen:
        return
    seen.add(key)
    yield at, above, unit
    below = at if above is None or _has_forward(at) else above
    for child in at.children():
        yield from _walk(child, below, unit, seen)

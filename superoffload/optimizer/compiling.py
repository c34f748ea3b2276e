"""Hooks that wait for parameters are seen by torch.compile, stay out of its graphs, and warn where code is traced."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import _dynamo, jit

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

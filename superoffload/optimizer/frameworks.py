"""What the optimizer asks of the framework that runs a model. The core itself knows plain PyTorch only.

An adapter in superoffload/integrations derives from ``Framework``, overrides the answers in which its framework differs
from plain PyTorch, and is the ``ADAPTER`` of its module. ``MODULES`` has their names, as strings: the core imports no
adapter, and the first optimizer loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from superoffload.distributed.session import Gathered
    from superoffload.host.signals import Alone
    from superoffload.optimizer.advice import Advice


_Answer = TypeVar("_Answer")


class Handle(Protocol):
    """Has a hook removed."""

    def remove(self) -> None: ...


class Gathering(Protocol):
    """Belongs to a module that gathers the parameters of all modules below it when its forward begins."""

    def together(self) -> list[nn.Module] | None:
        """Returns the modules that are gathered with it then; None: unknown, so all may be."""

    def streams(self) -> list[int]:
        """Returns the GPU streams, besides the current one, that read parameters then."""

    def call_before(self, function: Callable[[], None]) -> Handle:
        """Calls ``function`` before the module is gathered without a forward."""


class TakesReduced(Protocol):
    """Takes gradients that a framework has reduced over ranks, in the thread that runs backward."""

    def take_reduced(self, param: Tensor, gradient: Tensor) -> None:
        """Takes a flat gradient in the parameter's order, which the current stream may read and nothing writes before
        the step ends. It will be in ``param.grad``: ``step()`` compares that with it, bit by bit, and uses what is
        there. A later call before ``step()`` replaces it."""

    def confirm_reduced(self, param: Tensor) -> None:
        """Learns that ``param.grad`` has the gradient that was taken, which saves the comparison."""

    def leave_join(self) -> None:
        """Learns that this rank has no more inputs while others go on."""


class Reductions:
    """Hands the gradients that a framework has reduced to a taker during backward. Here there are none."""

    def give_to(self, taker: TakesReduced | None) -> None:
        """Has ``taker`` take them from now on, without keeping it alive. None: they are followed no longer."""

    def finish(self) -> None:
        """Hands over, at ``step()``, what an interrupted backward has left."""

    def stepped(self, advice: Advice) -> None:
        """Learns that there were gradients to step."""

    def forget(self) -> None:
        """Drops the gradients of a backward that is given up."""


class AccumulationWindow(Protocol):
    """Knows, for one optimizer, whether the framework's loop accumulates gradients."""

    def more_to_come(self) -> bool:
        """Returns whether another backward follows before ``step()``."""

    def step_begins(self, advice: Advice) -> None:
        """Learns that ``step()`` was called."""


class Framework:
    """Answers as plain PyTorch does."""

    def reduces_later(self, model: nn.Module) -> bool:
        """Returns whether gradients of plain parameters are reduced over ranks after their hooks have run."""
        return False

    def reducing(self, params: Collection[Tensor]) -> nn.Module | None:
        """Finds the model, among all of this process, that reduces the gradients of all these parameters."""

    def follow_reductions(self, model: nn.Module, alone: Alone) -> Reductions | None:
        """Follows the gradients that ``model`` reduces. None: it reduces none, or they cannot be followed, so that they
        are taken in ``step()``, without speculation. ``alone``, a context around every change of what waits for the
        taker, keeps other threads and signal handlers out."""

    def forward_view(self, model: nn.Module) -> Gathered | None:
        """Returns a collective generator of (sharded parameter, the value of it that a forward of ``model`` gathers);
        None: it gathers none."""

    def gathering(self, module: nn.Module) -> Gathering | None:
        """Returns how ``module`` gathers parameters when its forward begins; None: it gathers none."""

    def await_gradient(self, param: Tensor) -> None:
        """Waits, in a hook of ``param``, until its gradient can be read on the current stream."""

    def check_fp32_sums(self, model: nn.Module, params: Sequence[tuple[str, Tensor]]) -> None:
        """Raises ArgumentError where gradients of these named 16-bit parameters cannot be added up in fp32."""

    def keep_fp32_sums(self, model: nn.Module, params: Sequence[Tensor]) -> Callable[[], None] | None:
        """Keeps gradients in fp32 where the framework would round them; returns what undoes that."""

    def window(self) -> AccumulationWindow | None:
        """Returns the window of one optimizer; None: the framework has no loop of its own."""

    def is_copying_state(self) -> bool:
        """Returns whether the caller's ``state_dict()`` and ``load_state_dict()`` only move state to the device."""
        return False


MODULES = ["superoffload.integrations.accelerate", "superoffload.integrations.ddp", "superoffload.integrations.fsdp2"]


@cache
def adapters() -> tuple[Framework, ...]:
    """Returns the adapters, and loads them at the first call."""
    return tuple(import_module(name).ADAPTER for name in MODULES)


# ---- what the core asks ---------------------------------------------------------------------------------------------


def reduces_later(model: nn.Module | None) -> bool:
    return model is not None and any(adapter.reduces_later(model) for adapter in adapters())


def reducing(params: Collection[Tensor]) -> nn.Module | None:
    return _first(adapter.reducing(params) for adapter in adapters())


def follow_reductions(model: nn.Module, alone: Alone) -> Reductions:
    return _first(adapter.follow_reductions(model, alone) for adapter in adapters()) or Reductions()


def forward_view(model: nn.Module | None) -> Gathered | None:
    return None if model is None else _first(adapter.forward_view(model) for adapter in adapters())


def gathering(module: nn.Module) -> Gathering | None:
    return _first(adapter.gathering(module) for adapter in adapters())


def await_gradient(param: Tensor) -> None:
    for adapter in adapters():
        adapter.await_gradient(param)


def check_fp32_sums(model: nn.Module, params: Sequence[tuple[str, Tensor]]) -> None:
    for adapter in adapters():
        adapter.check_fp32_sums(model, params)


def keep_fp32_sums(model: nn.Module, params: Sequence[Tensor]) -> list[Callable[[], None]]:
    undo = [adapter.keep_fp32_sums(model, params) for adapter in adapters()]
    return [each for each in undo if each is not None]


def windows() -> list[AccumulationWindow]:
    found = [adapter.window() for adapter in adapters()]
    return [each for each in found if each is not None]


def is_copying_state() -> bool:
    return any(adapter.is_copying_state() for adapter in adapters())


def _first(answers: Iterable[_Answer | None]) -> _Answer | None:
    return next((answer for answer in answers if answer is not None), None)

"""Declares what our parts ask of DeepSpeed's ZeRO optimizers, and of the stage that they serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from superoffload.distributed.rank_checks import Held
from superoffload.distributed.session import Gathered
from superoffload.engine.bucket import Shard


class Stock(Protocol):
    """Declares public names that DeepSpeed's optimizers of all stages have.

    Parts have a weak proxy of one, so that an unreferenced engine does not keep itself alive.
    """

    optimizer: Any
    param_names: dict[Any, str]
    dp_process_group: Any
    dtype: torch.dtype
    gradient_accumulation_dtype: torch.dtype
    norm_for_param_grads: dict[int, Any]

    # a window
    gradient_accumulation_steps: int
    is_gradient_accumulation_boundary: Any

    @property
    def loss_scale(self) -> Any: ...
    @property
    def clip_grad(self) -> float: ...
    def get_param_id(self, param: Any) -> int: ...


@dataclass(frozen=True)
class Place:
    """Says where this rank's part of a parameter is in the flat buffers of its sub-group, and in the parameter.

    It has ``numel`` elements there, from ``offset``, with padding behind them up to ``size``; in the flat parameter
    they begin at ``start``.
    """

    offset: int
    size: int
    numel: int
    start: int

    @property
    def elements(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    @property
    def padding(self) -> slice:
        return slice(self.offset + self.numel, self.offset + self.size)


class Layout(Protocol):
    """Says where a stage keeps parameters and state. Buffers are looked up at each use, since DeepSpeed moves them."""

    ranks: Any  # the process group of all ranks that act on one verdict
    resident: frozenset[int]  # sub-groups whose state is on the accelerator
    written_in_place: bool  # steps may write parameters during backward: what gathers them can be told before
    keeps_norm_scale: bool  # stock divides the norm by the loss scale of the window, not by the next one

    @property
    def groups(self) -> Sequence[Sequence[Any]]:
        """Returns the parameters of each sub-group, also those of which this rank has no part: alike on all ranks."""

    @property
    def masters(self) -> Sequence[Tensor]:
        """Returns DeepSpeed's flat fp32 masters on this rank, one per sub-group; torch's optimizer has them."""

    def published(self, sub_group: int) -> Tensor:
        """Returns the flat parameters that this rank steps."""

    def gradients(self, sub_group: int) -> Tensor:
        """Returns flat memory for gradients, as long as the masters."""

    def places(self, sub_group: int) -> list[Place]: ...
    def param_group(self, sub_group: int) -> int: ...
    def key(self, param: Any) -> int: ...
    def numel(self, param: Any) -> int: ...
    def name(self, param: Any) -> str: ...

    def is_counted(self, param: Any) -> bool:
        """Tells whether the norm counts it here; if not, other ranks have the same parameter and count it."""

    def take_gradient(self, param: Any) -> Tensor | None:
        """Takes a reduced gradient away from where DeepSpeed keeps it, to be freed."""

    def held(self, sub_group: int, param: Any, shard: Shard) -> Held:
        """Describes a parameter to the rank checks."""

    @property
    def gathered(self) -> Gathered | None:
        """Returns what gathers parameters for the rank checks; None: every rank has all of them."""

    # what "match_stock" takes from DeepSpeed

    def norm_of(self, gradient: Tensor) -> Any:
        """Returns the norm of one parameter's gradient on this rank."""

    def norms_of_groups(self) -> Sequence[Any]:
        """Returns norms over all ranks, from ``norm_for_param_grads``."""

    def overflowed(self, here: bool) -> bool:
        """Tells whether any rank has a gradient that is not finite. ``here``: this rank has one."""


def trained(layout: Layout) -> Iterator[Any]:
    """Yields all parameters of the optimizer, in the order of its sub-groups."""
    for group in layout.groups:
        yield from group

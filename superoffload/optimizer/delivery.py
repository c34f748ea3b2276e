"""Delivery on demand: ``step()`` returns at once, and whoever reads parameters waits for just those.

Known readers are forward passes of the module, its ``state_dict()`` and loading into it. Everything else that reads or
writes parameters calls ``synchronize()`` first; ``check_reads()`` finds what does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from superoffload.arguments import check_in_module
from superoffload.bucket import Bucket
from superoffload.errors import StateError, SuperOffloadError
from superoffload.optimizer.lifetime import Lifetime
from superoffload.optimizer.module_hooks import ModuleHooks
from superoffload.optimizer.saved_state import SavedState
from superoffload.optimizer.untraced import untraced
from superoffload.optimizer.weakly import weakly
from superoffload.tracked import Tracked, notice, remember_values
from superoffload.undelivered import CheckReads
from superoffload.verdict import Verdict

if TYPE_CHECKING:
    from superoffload.ranks.session import RankSession


class Delivery(SavedState):
    """Who waits for parameters, and what happens when their new values arrive."""

    _module_hooks: ModuleHooks | None = None
    _look_is_due = False
    _delivering: int | None = None  # the thread that does

    @property
    def _on_demand(self) -> bool:
        return self._given.delivery == "on_demand"

    # ---- the module -------------------------------------------------------------------------------------------

    def _connect(self, params: Sequence[Tensor]) -> None:
        super()._connect(params)
        module = self._given.model() if self._given.model is not None else None
        if self._on_demand and module is not None:
            check_in_module(module, params)
            self._module_hooks = ModuleHooks(module, weakly(self._await))

    def _remove_hooks(self) -> None:
        super()._remove_hooks()
        if self._module_hooks is not None:
            self._module_hooks.remove()
            self._module_hooks = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, at any time; a step in flight keeps its gradients."""
        module = self._given.model() if self._given.model is not None else None
        if self._on_demand and module is not None and not self._constructing:
            check_in_module(module, param_group["params"])
        super().add_param_group(param_group)

    # ---- readers ----------------------------------------------------------------------------------------------

    @untraced
    def _await(self, params: Iterable[Tensor] | None, streams: Sequence[int] = ()) -> None:
        """Delivers ``params``, or all of them, before somebody reads them; ``streams``: not only on the current one."""
        if not self._core.is_landing or self._is_delivering or self._closed:
            return
        if self._pid != os.getpid():
            raise StateError(
                "this process was forked while parameters of the last step were not delivered yet, and its copy of "
                "them is old; call synchronize() before fork()"
            )
        shards = None
        if params is not None:
            shards = [self._tracked[param].shard for param in params if param in self._tracked]
        with torch.inference_mode(False), torch.no_grad(), self._whole():
            Lifetime._check_usable(self, closed_too=True)
            for stream in streams:
                self._core.link.read_on(stream)
            self._core.land(shards)

    def check_reads(self) -> CheckReads:
        """For debugging: in this context, a read or write of a parameter that is not delivered yet is a StateError.

        Views and other tensors that share memory with it included. Slow; NumPy arrays and compiled code go unseen.
        """
        return CheckReads(self._undelivered)

    def _undelivered(self) -> list[tuple[str, Tensor]]:
        """Names and values of what must not be read now."""
        if self._is_delivering or self._closed or not self._core.is_landing:
            return []
        return [(shard.name, shard.target()) for shard in self._core.landing_shards().values()]

    @property
    def _is_delivering(self) -> bool:
        """This thread is; others that read parameters must wait for it."""
        return self._delivering == threading.get_ident()

    # ---- what arrives -----------------------------------------------------------------------------------------

    def _before_landing(self, buckets: Sequence[Bucket]) -> None:
        """Values that users wrote meanwhile are not overwritten, where that can be helped: their pieces stay behind."""
        self._delivering = threading.get_ident()
        self._overtaken: dict[int, Tracked] = {}
        # Bits tell nothing where the new ones are on their way, nor may a stream read them that does not wait for them.
        under_way = self._core.link.asynchronous
        landing = self._stepped_in(buckets)
        overtaken = [one for one in landing if one.plainly_written] if under_way else notice(landing).written
        self._overtaken.update((tracked.shard.index, tracked) for tracked in overtaken)
        if self._overtaken and not under_way:  # else they are on their way since step()
            for bucket in buckets:
                bucket.present = [
                    present and piece.shard.index not in self._overtaken
                    for piece, present in zip(bucket.pieces, bucket.present, strict=True)
                ]

    def _after_landing(self, buckets: Sequence[Bucket]) -> SuperOffloadError | None:
        self._delivering = None
        remember_values(self._stepped_in(buckets), on_device=self._untold.on_device)
        errors = [self._overtaken_error(tracked) for tracked in self._overtaken.values()]
        return errors[0] if errors else None

    def _stepped_in(self, buckets: Sequence[Bucket]) -> list[Tracked]:
        indices = {piece.shard.index for bucket in buckets for piece in bucket.stepped_pieces()}
        return [self._of_shard[index] for index in sorted(indices)]

    def _overtaken_error(self, tracked: Tracked) -> SuperOffloadError:
        """Once; whatever the parameter has from now on is what its user wants."""
        tracked.forget_value()
        try:
            tracked.check_still_fits()
        except SuperOffloadError as misfit:
            return misfit
        fate = "is kept and counts from the next step on"
        if self._core.link.asynchronous:
            fate = "may have been overwritten by it"
        return StateError(
            f"{tracked.shard.name}: written after step(), before the value of that step was delivered. What was "
            f"written {fate}; with delivery='on_demand' call synchronize() before parameters are written "
            "(docs/pipeline.md)"
        )

    # ---- the step ---------------------------------------------------------------------------------------------

    def _apply(self, verdict: Verdict) -> None:
        self._delivering = threading.get_ident()
        try:
            self._core.apply(verdict, later=self._on_demand)
        finally:
            self._delivering = None

    def _take_stock(self) -> None:
        self._core.link.check_stream()
        self._core.land()
        self._look()
        super()._take_stock()

    def _start_filling(self) -> None:
        self._look()
        super()._start_filling()

    def _conclude(self, session: RankSession, verdict: Verdict) -> None:
        if not (self._core.is_landing or self._core.is_settling):
            super()._conclude(session, verdict)
            return
        session.count(applied=not verdict.found_inf, factor=verdict.gradient_factor)
        self._look_is_due = True
        if session.full_check_is_due:
            self._core.land()
            self._core.settle()
            self._look()
            session.check_everything()

    def _look(self) -> None:
        """The light rank check of a step that was published or settled after it: before anything is stepped anew."""
        session = self._ranks.session
        if not self._look_is_due or session is None:
            return
        self._look_is_due = False
        self._core.land()
        seen = session.seen_next()
        for held in seen:
            self._core.settle(held.shard)
        self._refresh_written(notice(self._tracked[held.param] for held in seen))
        session.look()

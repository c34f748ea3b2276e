"""An optimizer agrees on the verdict with other ranks, if there are any, and gathers the parts that they stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from superoffload.distributed.gather import Spread, gather
from superoffload.distributed.session import RankSetup
from superoffload.engine.engine import Engine
from superoffload.engine.verdict import Verdict
from superoffload.optimizer.gradient_source import gradient_of
from superoffload.optimizer.master_updates import MasterUpdates
from superoffload.optimizer.params import Params
from superoffload.optimizer.tracked_param import find_edits

if TYPE_CHECKING:
    from superoffload.distributed.session import RankSession


# ---- the verdict ----------------------------------------------------------------------------------------------------


class Ranks:
    """Shares one verdict between ranks. Here this process decides alone, and agrees with no other.

    Inside ``deciding()`` a rank takes stock, calls ``agree_on()`` with its settings, and decides.
    """

    session: RankSession | None = None

    def __init__(self, setup: RankSetup, params: Params) -> None:
        self.setup = setup
        self._params = params

    def announce(self) -> None:
        self._params.take_fresh()

    def all_say(self, what: str, answer: bool) -> bool:
        return answer

    def deciding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, what: str, error: Exception | None, left: str = "") -> None: ...
    def loaded(self) -> None: ...
    def look(self) -> None: ...
    def leave(self) -> None: ...
    def agree_on(self, settings: Mapping[str, Any], *, found_inf: bool) -> None: ...
    def gather(self, what: str, spreads: Sequence[Spread]) -> None: ...
    def gather_updates(self) -> None: ...
    def conclude(self, verdict: Verdict) -> None: ...


class OtherRanks(Ranks):
    """Decides with the ranks of a session, which compare their steps."""

    session: RankSession

    def __init__(self, setup: RankSetup, params: Params, engine: Engine, master_updates: MasterUpdates) -> None:
        super().__init__(setup, params)
        assert setup.session is not None
        self.session = setup.session
        self._engine = engine
        self._master_updates = master_updates
        self._look_is_due = False
        self._is_known = False  # to the other ranks

    def announce(self) -> None:
        """Tells other ranks which parameters are new, and at first even that there are none."""
        fresh = self._params.take_fresh()
        if fresh or not self._is_known:
            self.session.add(fresh)
            self._is_known = True
            self._params.mark_final(held.shard.index for held in fresh if self.session.owns_alone(held.shard.index))

    def agree(self, what: str, error: Exception | None, left: str = "nothing was changed on any") -> None:
        self.session.agree(what, error, left)

    def all_say(self, what: str, answer: bool) -> bool:
        """Returns, on each rank, whether all of them answer yes."""
        return all(self.session.group.exchange_objects(what, answer))

    def loaded(self) -> None:
        self.session.loaded(max((tracked.shard.steps for tracked in self._params), default=0))

    def leave(self) -> None:
        """Tells the others, who will step, that this rank has no more inputs."""
        self.session.begin()
        self.session.fail(left=True)

    # ---- the step ---------------------------------------------------------------------------------------------

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Tells the other ranks of an error inside, so that none of them waits for this one."""
        self._engine.last_step.settle()  # each rank sends samples of masters
        self.session.begin()
        try:
            yield
        except BaseException:
            self.session.fail()
            raise

    def agree_on(self, settings: Mapping[str, Any], *, found_inf: bool) -> None:
        """Has the exchange of the verdict compare ``settings``, and tell the others of ``found_inf``."""
        self.session.agree_on(settings, found_inf=found_inf)

    def gather(self, what: str, spreads: Sequence[Spread]) -> None:
        if spreads:
            gather(self.session.group, what, spreads)

    def gather_updates(self) -> None:
        """Gathers the parts that other ranks have stepped, of parameters whose state is spread over ranks."""
        held = [one for one in self.session.held if one.is_spread]
        spreads = [
            Spread(one.holding, one.shard.target(), one.copy()) for one in held if gradient_of(one.param) is not None
        ]
        if spreads:
            self.gather("the updated parameters", spreads)
            torch.autograd.graph.increment_version([one.param for one in held])

    def conclude(self, verdict: Verdict) -> None:
        """Has the session compare the step with those of other ranks, now or, if it is still under way, later."""
        applied, factor = not verdict.found_inf, verdict.gradient_factor
        if not (self._engine.last_step.is_landing or self._engine.last_step.is_settling):
            self.session.ended(applied=applied, factor=factor)
            return
        self.session.count(applied=applied, factor=factor)
        self._look_is_due = True
        if self.session.full_check_is_due:
            self._engine.last_step.land()
            self._engine.last_step.settle()
            self.look()
            self.session.check_everything()

    def look(self) -> None:
        """Does the light rank check of a step that was delivered or settled late, before the next one begins."""
        if not self._look_is_due:
            return
        self._look_is_due = False
        self._engine.last_step.land()
        seen = self.session.seen_next()
        for held in seen:
            self._engine.last_step.settle(held.shard)
        self._master_updates.follow_all(find_edits(self._params[held.param] for held in seen))
        self.session.look()

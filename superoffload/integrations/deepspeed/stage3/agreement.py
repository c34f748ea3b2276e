"""What ranks compare: settings and failures before a step, a part of what it has published after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from superoffload.arguments import check_rank_check
from superoffload.errors import WorkerError
from superoffload.integrations.deepspeed.driver import PartitionDriver
from superoffload.integrations.deepspeed.features import hyper_of
from superoffload.integrations.deepspeed.ranks import open_session
from superoffload.integrations.deepspeed.stage3.shards import Shards
from superoffload.ranks.session import RankSession


class Agreement(Shards):
    """No rank raises or steps alone; ranks that diverge are found."""

    _session: RankSession | None = None
    _failure: WorkerError | None = None
    _look_is_due = False
    _later = False  # what the last step publishes may not be there yet

    def _open_session(self, driver: PartitionDriver) -> RankSession | None:
        shards = [partition.shard for partition in driver.partitions.values()]
        names = [shard.name for shard in shards]
        options = self.superoffload_options
        check = check_rank_check(options.rank_check)
        return open_session(list(self._trained()), shards, names, check, self.dp_process_group, options.rank_timeout)

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        found: dict[str, Any] = {}
        for index in range(len(self.optimizer.param_groups)):
            for name, value in asdict(hyper_of(self.optimizer, index)).items():
                found[f"{name} of group {index}"] = value
        return {**found, "gradient_clipping": float(self.clip_grad), "loss scale": float(self.loss_scale)}

    @contextmanager
    def _for_the_next_step(self) -> Iterator[None]:
        """A failed worker between steps: to raise on one rank alone would leave the others waiting for it."""
        try:
            yield
        except WorkerError as failure:
            self._failure = self._failure or failure

    def _ended(self, *, applied: bool, factor: float) -> None:
        if self._session is not None:
            self._session.count(applied=applied, factor=factor)
            self._look_is_due = True

    def _look(self) -> None:
        """At a part of what the last step has published, before the next one begins or somebody writes."""
        if self._look_is_due and self._session is not None:
            self._look_is_due = False
            self._opened().deliver()
            self._session.look()

    def _check_ranks(self) -> None:
        """At the end of ``step()``. On demand, the look waits until forward has gathered what it needs."""
        if self._session is None or not self._look_is_due:
            return
        if self._session.full_check_is_due:
            self._look()
            self._session.check_everything()
        elif not self._later:
            self._look()

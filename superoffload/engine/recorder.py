"""What an engine tells a recorder of its steps, such as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superoffload.engine.bucket import Bucket
    from superoffload.engine.engine_options import Pool
    from superoffload.engine.verdict import Verdict
    from superoffload.links.base import Link


class Recorder:
    """Records nothing. One that records may stand between an engine and its link and worker threads."""

    def follow(self, buckets: Callable[[], Sequence[Bucket]]) -> None:
        """An engine begins; ``buckets`` returns those that it has. An engine before it has ended."""

    def wrap_link(self, link: Link) -> Link:
        """What the engine uses in the place of ``link``."""
        return link

    def wrap_pool(self, pool: Pool) -> Pool:
        """What the engine uses in the place of ``pool``."""
        return pool

    def deciding(self) -> None:
        """The end of a step was asked for."""

    def decided(self, verdict: Verdict) -> None:
        """The verdict is known."""

    def landed(self, buckets: Sequence[Bucket], began: float) -> None:
        """The training thread waited since ``began`` for buckets that were left for later, and delivered them."""

    def end_step(self, buckets: Sequence[Bucket]) -> None:
        """Every bucket has its fate."""

    def close(self) -> None:
        """No engine follows. Idempotent."""

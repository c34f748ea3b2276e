"""An engine reports its steps to a recorder, such as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from superoffload.engine.bucket import Bucket
    from superoffload.engine.engine_options import Pool
    from superoffload.engine.verdict import Verdict
    from superoffload.links.base import Link


class Recorder:
    """Records nothing. Subclasses record, and may wrap the engine's link and worker threads."""

    def follow(self, buckets: Callable[[], Sequence[Bucket]]) -> None:
        """Follows a new engine, whose buckets ``buckets`` returns. The engine before it has ended."""

    def wrap_link(self, link: Link) -> Link:
        """Returns the link that the engine uses instead of ``link``."""
        return link

    def wrap_pool(self, pool: Pool) -> Pool:
        """Returns the pool that the engine uses instead of ``pool``."""
        return pool

    def deciding(self) -> None:
        """Learns that the end of a step was asked for."""

    def decided(self, verdict: Verdict) -> None:
        """Learns the verdict."""

    def landed(self, buckets: Sequence[Bucket], began: float) -> None:
        """Learns that the training thread, since ``began``, waited for buckets left for later and delivered them."""

    def end_step(self, buckets: Sequence[Bucket]) -> None:
        """Learns that every bucket has its fate."""

    def close(self) -> None:
        """Ends the recording: no engine follows. Idempotent."""

"""A schedule that chooses the same in every step, for benchmarks and tests."""

from __future__ import annotations

from superoffload.engine.schedule import Schedule, Situation


class FixedSchedule(Schedule):
    """Speculates all buckets or none; ``published`` is the share of the others that is stepped in two phases."""

    def __init__(self, *, speculates: bool, published: float) -> None:
        super().__init__("always" if speculates else "never")
        self._share_published = published

    def share_to_publish(self, situation: Situation) -> float:
        return self._share_published

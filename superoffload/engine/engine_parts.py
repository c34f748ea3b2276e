"""An engine is assembled here: each part gets those that it needs."""

from __future__ import annotations

from collections.abc import Callable

from superoffload.engine.bucket import Bucket, GroupHyper, Shard
from superoffload.engine.engine_options import EngineOptions, Pool
from superoffload.engine.executor import Executor
from superoffload.engine.finisher import Finisher
from superoffload.engine.inbox import Inbox, Packer
from superoffload.engine.layout import Layout
from superoffload.engine.listener import Listener
from superoffload.engine.placement import Placer
from superoffload.engine.recorder import Recorder
from superoffload.engine.snapshot import Snapshots
from superoffload.engine.speculator import Speculator
from superoffload.engine.stats import Stats
from superoffload.engine.tail import Tail
from superoffload.links.base import Link


class EngineParts:
    """Owns the parts and ends them.

    ``hyper_of(group)`` returns a group's current hyper-parameters. ``listener`` is told of events, ``recorder`` records
    the steps, and ``placer`` chooses which state is on the accelerator (None: none).
    """

    def __init__(
        self,
        link: Link,
        options: EngineOptions,
        hyper_of: Callable[[int], GroupHyper],
        *,
        listener: Listener | None = None,
        recorder: Recorder | None = None,
        placer: Placer | None = None,
    ) -> None:
        listener, recorder = listener or Listener(), recorder or Recorder()
        link = recorder.wrap_link(link)
        self.link = link
        self.schedule = schedule = options.make_schedule()
        self.snapshots = Snapshots()
        self._recorder = recorder
        self._clock = options.clock
        self._stats = stats = Stats()
        pool = recorder.wrap_pool(options.make_pool())
        self.executor = Executor(link, pool, schedule, hyper_of, options.clock)
        self.layout = Layout(link, options, schedule, listener, placer, self.snapshots.protect)
        self.tail = Tail(link, self.layout, self.executor, schedule, listener, recorder)
        self.inbox = Inbox(link, self.layout)
        self.packer = Packer(link, self.layout, self.inbox, self.executor, listener)
        self.speculator = Speculator(link, self.layout, self.inbox, self.executor, schedule, self.snapshots, stats)
        self.finisher = Finisher(
            link,
            self.layout,
            self.speculator,
            self.executor,
            schedule,
            self.snapshots,
            stats,
            two_phase=options.two_phase,
        )
        self._incomplete: set[Bucket] = set()  # packed although gradients are missing: backward has passed them
        recorder.follow(lambda: self.layout.buckets)

    # ---- shards, buckets, threads -----------------------------------------------------------------------------

    @property
    def shards(self) -> list[Shard]:
        """Returns all shards in registration order."""
        return self.layout.shards

    @property
    def buckets(self) -> list[Bucket]:
        """Returns all buckets in the order in which backward completes them."""
        return self.layout.buckets

    @property
    def pool(self) -> Pool:
        """Returns the pool of worker threads."""
        return self.executor.pool

    # ---- figures, the end ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """Returns totals since construction (superoffload/engine/stats.py)."""
        self._stats.set(
            buckets_speculated=self.speculator.speculated,
            optimizer_seconds=self.executor.pool.busy_seconds,
            optimizer_seconds_exposed=self.executor.exposed_seconds,
            bytes_down=self.link.bytes_down,
            bytes_up=self.link.bytes_up,
            bytes_up_early=self.link.bytes_up_early,
            pinned_bytes=self.link.pinned_bytes,
            host_bytes=self.layout.host_bytes,
            journal_reserved_bytes=self.layout.journal_bytes_held,
            params_on_device=sum(shard.numel for shard in self.shards if shard.resident),
        )
        return self._stats.as_dict()

    def end_threads(self) -> None:
        """Ends the worker threads, then those of the link. Afterwards nothing writes to the user's memory."""
        self.executor.close()
        self.link.close()

    def __del__(self) -> None:
        # Workers must end before the tensors that they write to are freed.
        if hasattr(self, "executor"):
            self.end_threads()

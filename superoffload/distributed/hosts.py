"""Names ranks in errors, with their hosts where the ranks are on several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Hosts:
    """Holds the name of every rank's host. ``{}``: not known yet."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names if len(set(names.values())) > 1 else {}

    def rank(self, rank: int) -> str:
        """Returns "rank 1", with several hosts "rank 1 on gpu-07"."""
        return self.ranks([rank])

    def ranks(self, ranks: Iterable[int]) -> str:
        """Returns "rank 1, 2, 5", with several hosts "rank 1, 2 on gpu-07, rank 5 on gpu-09"."""
        by_host: dict[str, list[str]] = {}
        for rank in ranks:
            by_host.setdefault(self._names.get(rank, ""), []).append(str(rank))
        return ", ".join(f"rank {', '.join(some)}{f' on {host}' * bool(host)}" for host, some in by_host.items())

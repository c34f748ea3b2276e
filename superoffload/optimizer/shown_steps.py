"""Numbers of steps as ``state[p]["step"]`` shows them: views of one tensor for all parameters adopted together.

So a step counts them in one operation, and one comparison finds what a program has written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ShownSteps:
    """Has a float32 number for each place, and what it was when it was last looked at."""

    def __init__(self, places: int) -> None:
        self._tensor = torch.zeros(places, dtype=torch.float32, device="cpu")
        self._seen = np.full(places, np.nan, np.float32)

    def at(self, place: int) -> Tensor:
        return self._tensor[place]

    def look_again(self, place: int) -> None:
        """Notes that it may have been written since."""
        self._seen[place] = np.nan

    def count(self, places: Collection[int]) -> None:
        """Counts a step at these places."""
        where = list(places) if len(places) < len(self._seen) else slice(None)
        self._now()[where] += 1.0
        self._seen[where] += 1.0

    def looked_at(self, places: Iterable[int]) -> Iterator[tuple[int, float]]:
        """Yields (place, number) of these places; of none where nothing was written."""
        now = self._now()
        if not np.array_equal(now, self._seen):
            yield from ((place, float(now[place])) for place in places)

    def all_seen(self) -> None:
        self._seen[:] = self._now()

    def _now(self) -> NDArray[np.float32]:
        """Shows the tensor's memory, which a program may move: ``share_memory_()`` of a number does."""
        shown: NDArray[np.float32] = self._tensor.numpy()
        return shown

"""The last verdicts predict whether the next one spoils speculation, by clipping or skipping the step."""

from __future__ import annotations

_DEPTH = 4  # verdicts in the longest context: enough for patterns with a period of up to five steps
_MEMORY = 0.97  # older counts of a context are multiplied by this at each new one
_PRIOR = 3.0  # the weight of the shorter context's prediction, in verdicts


class SpoilPredictor:
    """Mixes Markov contexts: the longer one counts more, the more often it was seen.

    It learns a pattern such as "every other step clips" after a few repetitions. Where verdicts are independent, every
    context tends to their rate. It notices the end of a long run of clips at once, since few contexts with the new
    verdict were followed by a clip.
    """

    def __init__(self) -> None:
        self._last: tuple[bool, ...] = ()
        self._seen: dict[tuple[bool, ...], tuple[float, float]] = {}  # context -> spoiled, all; fading

    def observe(self, spoiled: bool) -> None:
        """Learns whether the verdict of a step clipped or skipped it."""
        for length in range(len(self._last) + 1):
            context = self._last[len(self._last) - length :]
            count, total = self._seen.get(context, (0.0, 0.0))
            self._seen[context] = (_MEMORY * count + spoiled, _MEMORY * total + 1.0)
        self._last = (*self._last, spoiled)[-_DEPTH:]

    @property
    def chance(self) -> float:
        """Returns the probability that the next verdict spoils; 0 before the first one."""
        chance = 0.0
        for length in range(len(self._last) + 1):
            count, total = self._seen.get(self._last[len(self._last) - length :], (0.0, 0.0))
            if total:
                prior = _PRIOR if length else 0.0
                chance = (count + prior * chance) / (total + prior)
        return chance

"""Will the next verdict spoil what is speculated? From the last verdicts: how often, and what followed such a run."""

from __future__ import annotations

_DEPTH = 4  # verdicts that are looked back at: enough for patterns with a period of up to five steps
_MEMORY = 0.97  # of what was seen in a context each time it comes up again
_PRIOR = 3.0  # how many verdicts a shorter context's opinion is worth


class SpoilPredictor:
    """A mixture of Markov contexts: the longer one counts more, the more often it was seen.

    A pattern such as "every other step clips" is known after a few repetitions; where verdicts are independent, every
    context tends to their rate; the end of a long run of clips is noticed at once, since no context that begins with
    what comes then has seen anything else.
    """

    def __init__(self) -> None:
        self._last: tuple[bool, ...] = ()
        self._seen: dict[tuple[bool, ...], tuple[float, float]] = {}  # context -> spoiled, all; fading

    def observe(self, spoiled: bool) -> None:
        """The verdict of a step clipped or skipped it, or did not."""
        for length in range(len(self._last) + 1):
            context = self._last[len(self._last) - length :]
            count, total = self._seen.get(context, (0.0, 0.0))
            self._seen[context] = (_MEMORY * count + spoiled, _MEMORY * total + 1.0)
        self._last = (*self._last, spoiled)[-_DEPTH:]

    @property
    def chance(self) -> float:
        """That the coming verdict spoils; 0 before anything was seen."""
        chance = 0.0
        for length in range(len(self._last) + 1):
            count, total = self._seen.get(self._last[len(self._last) - length :], (0.0, 0.0))
            if total:
                prior = _PRIOR if length else 0.0
                chance = (count + prior * chance) / (total + prior)
        return chance

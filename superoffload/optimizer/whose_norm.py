"""Tells the user once that ``max_grad_norm`` is about some of the ranks: those of ``process_group``, or this one.

Where ranks train parts of one model, as pipeline stages do, each part would get a clip coefficient of its own. Where
they train models of their own, that is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

_NAMED = 8  # of more ranks, the first ones


def say_whose_norm(max_grad_norm: float | None, ranks: Sequence[int], world: int) -> bool:
    """``ranks``: those that share the norm, of ``world``. Whether there was something to say; the group's first rank,
    which should be the one to call this, says it for all."""
    others = world - len(ranks)
    if max_grad_norm is None or not others:
        return False
    names = ", ".join(map(str, ranks[:_NAMED])) + (", ..." if len(ranks) > _NAMED else "")
    warnings.warn(
        f"superoffload: max_grad_norm={max_grad_norm:g} clips by the norm of the gradients on rank {names} alone "
        f"({len(ranks)} of {world}), as process_group= or replicated='local' says; the other {others} are clipped by "
        "norms of their own. If all of them train the same parameters, leave process_group and replicated out. If they "
        "train parts of one model, such as pipeline stages, leave max_grad_norm out, add the squares of the norms over "
        "all ranks, and clip by hand with that one norm, torch.nn.utils.clip_grads_with_norm_(), before step(), with "
        "keep_grads=True. If they train models of their own, it is as it should be: "
        "warnings.filterwarnings('ignore', message='superoffload: max_grad_norm')",
        RuntimeWarning,
        stacklevel=2,
    )
    return True

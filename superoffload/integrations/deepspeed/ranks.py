"""What ranks tell each other: which processors they may use, and this step's sums."""

from __future__ import annotations

import math
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from superoffload.cpus import allowed_cpus, worker_cpus


def cpus_of_this_rank(threads: int | None, group: Any) -> list[int]:
    """Ranks of one host that may use the same processors share them out; where each is bound already, it keeps its own.

    A collective of ``group``.
    """
    if threads is not None:
        return worker_cpus(threads)
    allowed = allowed_cpus()
    mine = (socket.gethostname(), os.environ.get("SLURM_JOB_ID"), tuple(allowed))
    all_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(all_ranks, mine, group=group)
    me = dist.get_rank(group)
    rank, ranks = all_ranks[:me].count(mine), all_ranks.count(mine)
    if ranks >= len(allowed):
        return [allowed[rank % len(allowed)]]
    return allowed[rank * len(allowed) // ranks : (rank + 1) * len(allowed) // ranks]


def fold_over_ranks(value: float, failed: bool, group: Any, device: torch.device | str) -> tuple[float, list[int]]:
    """The sum of one number of each rank, folded in rank order, so that it has the same bits on all of them; and the
    ranks of the group that failed."""
    mine = torch.tensor([value, float(failed)], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    total = 0.0
    failures = []
    for rank, (number, flag) in enumerate(torch.stack(gathered).tolist()):
        total += number
        if flag:
            failures.append(rank)
    return total if math.isfinite(total) else math.inf, failures

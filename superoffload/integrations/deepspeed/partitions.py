"""Exchanges between ranks which processors they may use, a step's sums, and the values for the rank checks."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype
from torch import Tensor

from superoffload.distributed.group import rank_group, rank_timeout
from superoffload.distributed.held import Held
from superoffload.distributed.ownership import Holding, flat_holding
from superoffload.distributed.session import RankCheck, RankSession
from superoffload.distributed.setup import near_gpu
from superoffload.engine.bucket import Shard
from superoffload.host.processors import RankOnNode, allowed_cpus, is_crowded, share_cpus, worker_cpus
from superoffload.integrations.deepspeed.whole_parameters import whole_parameter


def cpus_of_this_rank(
    threads: int | None, published: Sequence[Tensor], group: Any, timeout: float | None
) -> tuple[list[int], bool]:
    """Returns a processor per worker thread; ranks of one host share the processors that they may use. Collective.

    Also tells, alike on all ranks, whether a host has more ranks than processors. ``published``: tensors on the
    parameters' device, near which the processors should be.
    """
    mine = RankOnNode(socket.gethostname(), dist.get_rank(), tuple(allowed_cpus()), near_gpu(published))
    own_group = rank_group(group, rank_timeout(timeout))
    all_ranks = [mine] if own_group is None else own_group.exchange_objects("the processors of each rank", mine)
    beside_device = any(each.device.type != "cpu" for each in published)
    cpus = worker_cpus(threads, share_cpus(all_ranks, mine.rank), beside_device=beside_device)
    return cpus, is_crowded(all_ranks)


def open_session(
    params: Sequence[Any],
    shards: Sequence[Shard],
    names: Sequence[str],
    check: tuple[bool, int],
    group: Any,
    timeout: float | None,
) -> RankSession | None:
    """Opens the exchange of verdicts and the rank checks over the ranks of ``group``; None if this rank is alone.

    ``timeout``: seconds until a rank that does not answer is lost; None: as the environment says.

    ``params`` and their ``shards`` are in the order that all ranks have. Collective.
    """
    own_group = rank_group(group, rank_timeout(timeout))
    if own_group is None:
        return None
    owners = dist.get_process_group_ranks(group)
    held = [
        Held(name, _whole(param), shard, _holding(param, owners, own_group.rank))
        for param, shard, name in zip(params, shards, names, strict=True)
    ]
    by_whole = {id(param): one.param for param, one in zip(params, held, strict=True)}

    def gathered() -> Iterator[tuple[Tensor, Tensor]]:
        for param in params:
            with whole_parameter(param) as full:
                # torch_autocast gathers in its dtype and casts back; in that dtype all ranks have the same values.
                yield by_whole[id(param)], full.to(get_allgather_dtype(param, param.ds_tensor))

    session = RankSession(own_group, RankCheck(*check), gathered)
    session.add(held)
    return session


def _whole(param: Any) -> Tensor:
    """Makes a stand-in for a parameter that has no elements while it is partitioned."""
    return torch.empty(param.ds_shape, dtype=param.dtype, device="meta")


def _holding(param: Any, owners: Sequence[int], rank: int) -> Holding:
    """Cuts the flat parameter like ZeRO-3 into equal parts, the last ones shorter or empty."""
    return flat_holding("ZeRO-3", owners, rank, int(param.ds_numel), int(param.partition_numel()))

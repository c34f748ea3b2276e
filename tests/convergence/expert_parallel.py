"""Trains a mixture of experts, whose experts have a mesh of their own, as engine ``ep``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training.model import Transformer
from tests.convergence.engines import Fsdp2, sharded
from tests.convergence.meshes import PAIR, mesh_of
from tests.convergence.mixture import Compute, Experts


class ExpertParallel(Fsdp2):
    """Spreads the experts over two ranks, and ``fully_shard`` over the others; all other parameters are sharded over
    all ranks. Each rank has tokens of its own, and an all-to-all takes them to their experts."""

    def wrap(self, model: Transformer) -> nn.Module:
        count = dist.get_world_size()
        mesh = mesh_of(shard=count // PAIR, experts=PAIR)
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            _spread(experts, mesh["experts"])
            sharded(experts, self.setup.dtype, mesh["shard"])
        return sharded(model, self.setup.dtype, mesh_of(all=count))


def _spread(experts: Experts, mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    experts.exchange = AllToAll(mesh.get_group(), len(experts.gate_up) // mesh.size())
    for name, param in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)])))


class AllToAll:
    """Takes each token to the rank that has its expert, and what becomes of it back. Each of the ranks in ``group`` has
    ``each`` experts."""

    def __init__(self, group: Any, each: int) -> None:
        self.ranks, self._group, self._each = dist.get_world_size(group), group, each

    def run(self, tokens: Tensor, chosen: Tensor, compute: Compute) -> Tensor:
        away = torch.bincount(chosen // self._each, minlength=self.ranks)
        here = torch.empty_like(away)
        dist.all_to_all_single(here, away, group=self._group)
        counts = away.tolist(), here.tolist()
        arrived = _Moved.apply(tokens, *counts, self._group)
        made = compute(arrived, _moved(chosen % self._each, *counts, self._group))
        back: Tensor = _Moved.apply(made, *reversed(counts), self._group)
        return back.clone()  # fully_shard warns of what might be a view


class _Moved(torch.autograd.Function):
    """Sends the first ``away[0]`` rows to rank 0 of the group, and so on; their gradients come the same way back."""

    @staticmethod
    def forward(context: Any, rows: Tensor, away: list[int], here: list[int], group: Any) -> Tensor:
        context.way_back = here, away, group
        return _moved(rows, away, here, group)

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        return _moved(grads[0], *context.way_back), None, None, None


def _moved(rows: Tensor, away: list[int], here: list[int], group: Any) -> Tensor:
    got = rows.new_empty(sum(here), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), here, away, group=group)
    return got

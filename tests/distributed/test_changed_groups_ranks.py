"""Ranks whose programs change param groups alike go on with the state that they had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from tests.support.rank_processes import loss_of, net, on_ranks, tokens_of, wholes_of
from tests.support.saved_ranks import build


def trained(way: str, speculation: str, regroup: bool) -> Any:
    """A parameter trains with another learning rate from the third step on: it moves to a group that has it, or its
    own group gets it. Another one rests in the fourth."""
    model: Any
    if way == "ddp":
        model, options = DistributedDataParallel(net(torch.float32)), dict[str, Any]()
    else:
        model, options = build(way)
    params = [p for p in model.parameters() if p.requires_grad]
    if regroup:
        groups = [{"params": params[:4]}, {"params": params[4:], "lr": 0.02}]
    else:
        groups = [{"params": [p], **({"lr": 0.02} if i >= 4 else {})} for i, p in enumerate(params)]
    options = {"lr": 3e-3, "threads": 1, "bucket_numel": 1024, "model": model, "rank_timeout": 60.0, **options}
    with AdamW(groups, speculation=speculation, **options) as optimizer:
        for seed in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, seed) if way == "ddp" else model.loss(tokens_of(seed, 0))
            loss.backward()
            if seed == 2 and regroup:
                optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(1))
            elif seed == 2:
                optimizer.param_groups[1]["lr"] = 0.02
            if seed == 3:
                _rests(optimizer, params[0], regroup)
            optimizer.step()
            if seed == 3 and regroup:
                optimizer.param_groups[0]["params"].append(params[0])
        return [tensor.tolist() for tensor in wholes_of(model)], float(optimizer.grad_norm)


def _rests(optimizer: AdamW, param: nn.Parameter, regroup: bool) -> None:
    if regroup:
        assert optimizer.param_groups[0]["params"].pop(0) is param
    else:
        param.grad = None


@pytest.mark.parametrize(("way", "speculation"), [("split masters", "always"), ("shard", "never"), ("ddp", "always")])
def test_ranks_change_groups_together(way: str, speculation: str) -> None:
    expected = on_ranks(2, trained, way, "never", False)
    found = on_ranks(2, trained, way, speculation, True)
    for (weights, norm), (of_before, norm_before) in zip(found, expected, strict=True):
        assert weights == of_before
        assert norm == pytest.approx(norm_before, rel=1e-9)

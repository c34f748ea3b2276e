"""What ranks do with their state: groups that change, sleep, split masters under the full check."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW
from superoffload.host.tensors import local_of
from tests.support.rank_processes import loss_of, net, on_ranks, optimizer_of, tokens_of, wholes_of
from tests.support.saved_ranks import build, step
from tests.support.split_masters import assert_split, away, same_bits, same_states, state_of, tied


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
            if seed == 3 and regroup:
                assert optimizer.param_groups[0]["params"].pop(0) is params[0]
            elif seed == 3:
                params[0].grad = None
            optimizer.step()
            if seed == 3 and regroup:
                optimizer.param_groups[0]["params"].append(params[0])
        return [tensor.tolist() for tensor in wholes_of(model)], float(optimizer.grad_norm)


@pytest.mark.parametrize(("way", "speculation"), [("split masters", "always"), ("shard", "never"), ("ddp", "always")])
def test_ranks_change_groups_together(way: str, speculation: str) -> None:
    expected = on_ranks(2, trained, way, "never", False)
    found = on_ranks(2, trained, way, speculation, True)
    for (weights, norm), (of_before, norm_before) in zip(found, expected, strict=True):
        assert weights == of_before
        assert norm == pytest.approx(norm_before, rel=1e-9)


def digests(way: str, slept: tuple[int, ...]) -> Any:
    """Ranks in ``slept`` sleep after every step; the norm clips most steps."""
    model, options = build(way)
    with optimizer_of(model, rank_check="full", max_grad_norm=0.5, **options) as optimizer:
        held = []
        for seed in range(5):
            step(model, optimizer, seed)
            if dist.get_rank() in slept:
                optimizer.zero_grad()
                optimizer.sleep()
                held.append(optimizer.stats()["host_bytes"])
                optimizer.wake()
        return optimizer.state_digests(), optimizer.grad_norm, len(set(held)) <= 1


@pytest.mark.parametrize("way", ["8-bit moments", "shard"])
def test_ranks_sleep_alone_or_together(way: str) -> None:
    expected = on_ranks(2, digests, way, ())
    assert on_ranks(2, digests, way, (1,)) == expected
    assert on_ranks(2, digests, way, (0, 1)) == expected


def carried(way: str, first: str, second: str) -> None:
    """Masters at ties, of which the parameters are the even neighbours, and then, behind a step of nothing, either
    rounding; loaded by optimizers of the other kind. All ranks check everything at every step."""
    model, options = build(way)
    checks: dict[str, Any] = {"rank_check": "full", "lr": 0.0, "max_grad_norm": None, **options}
    with optimizer_of(model, master_dtype=first, **checks) as saved:
        step(model, saved, 0)
        tied(saved, model)
        for again in (False, True):
            if again:
                step(model, saved, 2)
                published = [saved.parts.params.holding_of(param).part(param.detach()) for param in saved.state]
                now = [shard.read_masters() for shard in saved._engine.shards]
                assert all(map(same_bits, published, map(away if first == "split" else Tensor.bfloat16, now)))
            masters = state_of(saved)
            other, _ = build(way, seed=7)
            with optimizer_of(other, master_dtype=second, **checks) as loaded:
                step(other, loaded, 1)
                other.load_state_dict(model.state_dict())
                loaded.load_state_dict(saved.state_dict())
                assert same_states(state_of(loaded), masters)
                # Checked as it was loaded: no step has published anything since. One rank's gradient is no number.
                loaded.zero_grad()
                other.loss(tokens_of(50, 0)).backward()
                gradient: Any = next(other.layers.parameters()).grad
                if dist.get_rank() == 1:
                    local_of(gradient).view(-1)[-1] = torch.nan
                loaded.step()
                assert same_states(state_of(loaded), masters) and loaded.stats()["skipped_steps"] == 1
                for group in loaded.param_groups:
                    group["lr"] = 1e-2
                step(other, loaded, 3)
                if second == "split":
                    assert_split(loaded)


@pytest.mark.parametrize(
    ("way", "first", "second"),
    [("fsdp2", "split", "fp32"), ("shard", "fp32", "split")],
)
def test_the_full_check_knows_both_roundings(way: str, first: str, second: str) -> None:
    on_ranks(2, carried, way, first, second)

"""State on the accelerator with several ranks: the bits of a run without, whatever each rank has placed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from superoffload import AdamW, checkpoints
from superoffload.errors import DeviceError, TornStep
from tests.support.fsdp2_cases import Case, build, poison
from tests.support.rank_processes import BF16, error_of, loss_of, net, on_ranks, optimizer_of
from tests.support.resident_link import HostResidency, ResidentHostLink, accelerator

HALF, WHOLE = {"gpu_fraction": 0.5}, {"gpu_fraction": 1.0}
STEPS = 8  # "auto" chooses after four


@dataclass(frozen=True)
class Run:
    """How a model is wrapped and trained."""

    kind: str = "fsdp2"  # "ddp", or "spread": DDP whose state is spread over the ranks
    case: Case = field(default_factory=Case)
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def training(run: Run, placement: Any) -> Iterator[tuple[Any, AdamW, ResidentHostLink]]:
    model: Any = build(run.case) if run.kind == "fsdp2" else net(run.case.dtype)
    if run.kind != "fsdp2":
        model = DistributedDataParallel(model, bucket_cap_mb=0.005)
    options = {**run.options, **({"replicated": "shard"} if run.kind == "spread" else {})}
    if options.get("delivery") == "on_demand":
        options["module"] = model
    with accelerator() as links, optimizer_of(model, placement=placement, **options) as optimizer:
        yield model, optimizer, links[0]


def train(model: Any, optimizer: AdamW, steps: range) -> list[float]:
    """One of three steps clips; step 2 has a NaN on the last rank only and is skipped."""
    losses = []
    for step in steps:
        optimizer.max_grad_norm = (50.0, 0.05, 0.5)[step % 3]
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        if step == 2 and not isinstance(model, DistributedDataParallel):
            poison(model)
        elif step == 2 and dist.get_rank() == 1:
            model.module.head.weight.grad[-1, -1] = math.nan
        optimizer.step()
        losses += [loss.item(), optimizer.grad_norm]
    return losses


def outcome(run: Run, placement: Any) -> tuple[Any, dict[str, Any]]:
    """What must be the same with and without; and what shows what was placed."""
    with training(run, placement) as (model, optimizer, link):
        losses, stats = train(model, optimizer, range(STEPS)), optimizer.stats()
        counts = [stats[name] for name in ("steps", "skipped_steps", "clipped_steps")]
        seen = {
            "share": stats["params_on_device"] / sum(shard.numel for shard in optimizer._engine.shards),
            "stepped": len(link.residency.stepped),
            "why": optimizer.placement and optimizer.placement["why"],
        }
        assert stats["clipped_steps"] > 0
        return (optimizer.state_digests(), [repr(loss) for loss in losses], counts), seen


def both(run: Run, placement: Any) -> dict[str, Any]:
    expected, without = outcome(run, None)
    found, seen = outcome(run, placement)
    assert found == expected
    assert without["share"] == without["stepped"] == 0
    return seen


CASES: dict[str, tuple[Run, Any]] = {
    "fsdp2, bf16": (Run(case=Case(torch.bfloat16, BF16, state_dtype="bf16"), options={"delivery": "on_demand"}), WHOLE),
    "fsdp2, empty shards": (Run(case=Case(layers=1, width=1)), HALF),
    "fsdp2, tied": (Run(case=Case(tied=True), options={"speculation": "always", "rank_check": "full"}), "auto"),
    "ddp": (Run("ddp", Case(torch.bfloat16), {"speculation": "never", "rank_check": {"full": 5}}), "auto"),
    "spread": (Run("spread", options={"rank_check": "full"}), HALF),
}


@pytest.mark.parametrize("name", CASES)
def test_placement_changes_no_bit(name: str) -> None:
    run, placement = CASES[name]
    for seen in on_ranks(2, both, run, placement):
        if placement == "auto":
            assert "one pass on the processors takes" in seen["why"]
        else:
            assert 0.2 < seen["share"] <= placement["gpu_fraction"] and seen["stepped"] > 0


def saved_and_loaded(kind: str, folder: str) -> None:
    """Saved in the middle, in the background; goes on with another placement and without any."""
    run = Run(kind)
    with training(run, None) as (model, optimizer, _):
        train(model, optimizer, range(6))
        expected = optimizer.state_digests()
    with training(run, HALF) as (model, optimizer, _):
        train(model, optimizer, range(3))
        saving = checkpoints.save_in_background(folder, model, optimizer)
        state, weights = optimizer.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}
        train(model, optimizer, range(3, 6))
        saving.wait(60)
        assert optimizer.state_digests() == expected
    for placement in (None, "auto", WHOLE):
        with training(run, placement) as (model, optimizer, _):
            if placement is WHOLE:
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            else:
                checkpoints.load(folder, model, optimizer)
            train(model, optimizer, range(3, 6))
            assert optimizer.state_digests() == expected, placement


@pytest.mark.parametrize("kind", ["fsdp2", "spread"])
def test_checkpoints_fit_any_placement(kind: str, tmp_path: Path) -> None:
    on_ranks(2, saved_and_loaded, kind, str(tmp_path / "a"))


def refused_on_one() -> None:
    """The second rank's accelerator refuses a step whose verdict both ranks act on."""
    with training(Run(options={"rank_check": "off"}), HALF) as (model, optimizer, _):
        train(model, optimizer, range(1))
        if dist.get_rank() == 0:
            train(model, optimizer, range(1, 2))
            return
        with mock.patch.object(HostResidency, "step", mock.Mock(side_effect=DeviceError("refused"))):
            torn = error_of(lambda: train(model, optimizer, range(1, 2)))
        assert torn.startswith(TornStep.__name__) and "load the last checkpoint" in torn
        assert "cannot be trusted" in error_of(optimizer.step)


def test_an_accelerator_that_refuses_a_shared_step_is_the_end_of_its_rank() -> None:
    on_ranks(2, refused_on_one)

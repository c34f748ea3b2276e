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
from superoffload.engine.placement import Placer
from superoffload.engine.placement_choice import Measured
from superoffload.errors import DeviceError, TornStep
from tests.support.fsdp2_cases import Case, build, poison
from tests.support.rank_processes import BF16, error_of, loss_of, net, on_ranks, optimizer_of, tokens_of
from tests.support.resident_link import HostResidency, ResidentHostLink, accelerator

HALF = {"gpu_fraction": 0.5}
STEPS = 8  # "auto" chooses after four


@dataclass(frozen=True)
class Run:
    """How a model is wrapped and trained."""

    kind: str = "fsdp2"  # "ddp", or "spread": DDP whose state is spread over the ranks
    case: Case = field(default_factory=Case)
    options: dict[str, Any] = field(default_factory=dict)


def model_of(run: Run) -> Any:
    if run.kind == "fsdp2":
        return build(run.case)
    return DistributedDataParallel(net(run.case.dtype), bucket_cap_mb=0.005)


@contextmanager
def training(run: Run, placement: Any) -> Iterator[tuple[Any, AdamW, ResidentHostLink]]:
    model = model_of(run)
    options = dict(run.options)
    if run.kind == "spread":
        options["replicated"] = "shard"
    if options.get("delivery") == "on_demand":
        options["module"] = model
    with accelerator() as links, optimizer_of(model, placement=placement, **options) as optimizer:
        yield model, optimizer, links[0]


def train(run: Run, model: Any, optimizer: AdamW, steps: range) -> list[float]:
    """One of three steps clips; step 2 has a NaN on the last rank only and is skipped."""
    losses = []
    for step in steps:
        optimizer.max_grad_norm = (50.0, 0.05, 0.5)[step % 3]
        optimizer.zero_grad()
        rows = tokens_of(step, dist.get_rank())
        loss = model.loss(rows) if run.kind == "fsdp2" else loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        if step == 2:
            if run.kind == "fsdp2":
                poison(model, dist.get_rank(), dist.get_world_size())
            elif dist.get_rank() == 1:
                model.module.head.weight.grad[-1, -1] = math.nan
        optimizer.step()
        losses.append(optimizer.grad_norm)
    return losses


def outcome(run: Run, placement: Any) -> tuple[Any, dict[str, Any]]:
    """What must be the same with and without; and what shows what was placed."""
    with training(run, placement) as (model, optimizer, link):
        losses = train(run, model, optimizer, range(STEPS))
        stats = optimizer.stats()
        counts = [stats[name] for name in ("steps", "skipped_steps", "clipped_steps")]
        seen = {
            "placed": stats["params_on_device"],
            "stepped": len(link.residency.stepped),
            "all": sum(shard.numel for shard in optimizer._engine.shards),
            "why": optimizer.placement and optimizer.placement["why"],
            "clipped": stats["clipped_steps"],
        }
        return (optimizer.state_digests(), [repr(loss) for loss in losses], counts), seen


def both(run: Run, placement: Any) -> tuple[bool, dict[str, Any]]:
    """In a rank."""
    expected, without = outcome(run, None)
    found, seen = outcome(run, placement)
    assert without["placed"] == without["stepped"] == 0
    return found == expected, seen


RUNS = {
    "fsdp2, bf16": Run(case=Case(dtype=torch.bfloat16, policy=BF16, state_dtype="bf16")),
    "fsdp2, empty shards": Run(case=Case(layers=1, width=1)),
    "fsdp2, tied": Run(case=Case(tied=True), options={"speculation": "always", "rank_check": "full"}),
    "fsdp2, on demand": Run(options={"delivery": "on_demand"}),
    "ddp, bf16, never": Run("ddp", Case(dtype=torch.bfloat16), {"speculation": "never", "rank_check": {"full": 5}}),
    "ddp, on demand": Run("ddp", options={"delivery": "on_demand"}),
    "spread": Run("spread", options={"rank_check": "full"}),
}


WHOLE = {"gpu_fraction": 1.0}
CASES: list[tuple[str, Any]] = [
    ("fsdp2, bf16", WHOLE),
    ("fsdp2, empty shards", HALF),
    ("fsdp2, tied", HALF),
    ("fsdp2, on demand", "auto"),
    ("ddp, bf16, never", "auto"),
    ("ddp, on demand", HALF),
    ("spread", HALF),
]


@pytest.mark.parametrize(("name", "placement"), CASES, ids=str)
def test_placement_changes_no_bit(name: str, placement: Any) -> None:
    for same, seen in on_ranks(2, both, RUNS[name], placement):
        assert same
        assert seen["clipped"] > 0
        if placement == "auto":
            assert "one pass on the processors takes" in seen["why"]
        else:
            share = seen["placed"] / seen["all"]
            assert 0.2 < share <= placement["gpu_fraction"]
            assert seen["stepped"] > 0


def apart(run: Run) -> tuple[bool, float]:
    """Every rank measures something else, places by it, and none of them is asked by the others."""
    fraction = (0.3, 0.9)[dist.get_rank()]

    def measure(placer: Placer, measured: Measured) -> None:
        placer.fraction, placer.why = fraction, "one pass on the processors takes as long as this test says"

    expected, _ = outcome(run, None)
    with mock.patch.object(Placer, "measure", measure):
        found, seen = outcome(run, "auto")
    return found == expected, seen["placed"] / seen["all"]


@pytest.mark.parametrize("kind", ["fsdp2", "spread"])
def test_ranks_may_place_different_shares(kind: str) -> None:
    """Full checks in every step compare state that one rank has on the accelerator and another in host memory."""
    first, second = on_ranks(2, apart, Run(kind, options={"rank_check": "full"}))
    assert first[0] and second[0]
    assert 0.1 < first[1] <= 0.3 < second[1] <= 0.9


def saved_and_loaded(kind: str, folder: str) -> list[bool]:
    """Saved in the middle, in the background; goes on with another placement and without any."""
    run = Run(kind)
    with training(run, None) as (model, optimizer, _):
        train(run, model, optimizer, range(6))
        expected = optimizer.state_digests()
    with training(run, HALF) as (model, optimizer, _):
        train(run, model, optimizer, range(3))
        saving = checkpoints.save_in_background(folder, model, optimizer)
        state, weights = optimizer.state_dict(), {n: v.clone() for n, v in model.state_dict().items()}
        train(run, model, optimizer, range(3, 6))
        saving.wait(60)
        found = [optimizer.state_digests() == expected]
    for placement in (None, "auto", WHOLE):
        with training(run, placement) as (model, optimizer, _):
            if placement is WHOLE:
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            else:
                checkpoints.load(folder, model, optimizer)
            train(run, model, optimizer, range(3, 6))
            found.append(optimizer.state_digests() == expected)
    return found


@pytest.mark.parametrize("kind", ["fsdp2", "spread"])
def test_checkpoints_fit_any_placement(kind: str, tmp_path: Path) -> None:
    assert on_ranks(2, saved_and_loaded, kind, str(tmp_path / "a")) == [[True] * 4] * 2


def refused_on_one() -> list[str]:
    """The second rank's accelerator refuses a step whose verdict both ranks act on."""
    run = Run(options={"rank_check": "off"})
    with training(run, HALF) as (model, optimizer, _):
        train(run, model, optimizer, range(1))
        if dist.get_rank() == 0:
            train(run, model, optimizer, range(1, 2))
            return []
        with mock.patch.object(HostResidency, "step", mock.Mock(side_effect=DeviceError("refused"))):
            torn = error_of(lambda: train(run, model, optimizer, range(1, 2)))
        return [torn, error_of(optimizer.step)]


def test_an_accelerator_that_refuses_a_shared_step_is_the_end_of_its_rank() -> None:
    first, (torn, after) = on_ranks(2, refused_on_one)
    assert first == []
    assert torn.startswith(TornStep.__name__) and "load the last checkpoint" in torn
    assert "cannot be trusted" in after

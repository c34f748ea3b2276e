"""What people do around an optimizer of a model that lies over ranks: as torch.optim.AdamW doing the same."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from superoffload import AdamW
from tests.support import fsdp2_loops as loops
from tests.support.adamw_training import TorchAdamW
from tests.support.fsdp2_loops import STEPS, Scenario, backward, train
from tests.support.layouts import RANKS, layouts
from tests.support.rank_processes import (
    Net,
    error_of,
    flat_mesh,
    net,
    on_ranks,
    optimizer_of,
    shard,
    whole,
    wholes_of,
)
from tests.support.refusal import Refusal

BATTERY: dict[Scenario, dict[str, Any]] = {  # and options
    loops.checkpointed: {"checkpointing": True},
    loops.tied: {"tied": True},
    loops.loss_scaling: {},
    loops.accumulation: {},
    loops.accumulate: {},
    loops.clip_norm: {},
    loops.clip_value: {},
    loops.edited: {},
    loops.zeroing: {},
    loops.without_gradients: {},
    loops.freezing: {},
    loops.writes: {},
    loops.listed_writes: {},
    loops.closure: {},
    loops.hooks: {},
    loops.parameter_hooks: {},
    loops.averages: {},
    loops.schedulers: {},
    loops.add_group: {"without_head": True},
    loops.autocast: {"tolerance": 5e-4},
    loops.scaler: {"tolerance": 2e-5},
}


def run(scenario: Scenario, options: dict[str, Any]) -> dict[str, Any]:
    """In a rank: ours in two modes, and torch's, on the same sharded model."""
    found: dict[str, Any] = {}
    for mode in ("always", "never"):
        model = built(options)
        with optimizer_of_all(model, mode, options) as optimizer:
            scenario(model, optimizer)
            found[mode] = optimizer.state_digests()
            found[f"{mode} stats"] = optimizer.stats()
        found["ours"] = wholes_of(model)
    theirs = built(options)
    params = [p for p in trained(theirs, options) if p.requires_grad]
    scenario(theirs, TorchAdamW(params, lr=1e-3, max_grad_norm=options.get("max_grad_norm")))
    found["torch"] = wholes_of(theirs)
    return found


def built(options: dict[str, Any]) -> Net:
    model = net(torch.float32, tied=bool(options.get("tied")))
    if options.get("checkpointing"):
        model.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)
    return shard(model, flat_mesh())


def trained(model: Net, options: dict[str, Any]) -> list[nn.Parameter]:
    left_out = {id(p) for p in model.head.parameters()} if options.get("without_head") else set()
    return [p for p in model.parameters() if id(p) not in left_out]


def optimizer_of_all(model: Net, mode: str, options: dict[str, Any]) -> AdamW:
    params = [p for p in trained(model, options) if p.requires_grad]
    limit = options.get("max_grad_norm")
    return AdamW(params, lr=1e-3, max_grad_norm=limit, speculation=mode, threads=1, bucket_numel=1024, model=model)


def compare(scenario: Scenario, *, tolerance: float = 3e-6, ranks: Any = on_ranks, **options: Any) -> None:
    for found in ranks(2, run, scenario, options):
        assert found["always"] == found["never"]
        for ours, theirs in zip(found["ours"], found["torch"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=tolerance)  # a wrong step is off by 1e-3
        if scenario is loops.accumulate:  # all gradients of a layer share one version counter, and are not edited
            stats = found["always stats"]
            assert stats["buckets_undone"] == 0 < stats["buckets_speculated"]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("scenario", "ranks", "options"),
    [
        pytest.param(scenario, ranks, options, id=f"{scenario.__name__}-{column}")
        for scenario, options in BATTERY.items()
        for column, ranks in RANKS.items()
    ],
)
def test_as_torch(scenario: Scenario, ranks: Any, options: dict[str, Any]) -> None:
    compare(scenario, ranks=ranks, **options)


def test_clipping_twice() -> None:
    """By the user, and by max_grad_norm."""
    compare(loops.clip_norm, max_grad_norm=0.02)


def several() -> list[bool]:
    """Two optimizers on one model, stepped in turn; as torch's two."""
    results = []
    for kind in ("always", "never", "torch"):
        model = shard(net(torch.float32), flat_mesh())
        params = [p for p in model.parameters() if p.requires_grad]
        parts = (params[::2], params[1::2])
        if kind == "torch":
            optimizers: list[Any] = [TorchAdamW(part, lr=1e-3) for part in parts]
        else:
            optimizers = [AdamW(part, lr=1e-3, speculation=kind, threads=1, model=model) for part in parts]
        for seed in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(model, seed)
            for optimizer in optimizers[: 1 + seed % 2]:
                optimizer.step()
        results.append(wholes_of(model))
        for optimizer in optimizers:
            optimizer.close()
    always, never, torchs = results
    return [
        all(torch.equal(a, b) for a, b in zip(always, never, strict=True)),
        all(torch.allclose(a, b, rtol=1e-4, atol=3e-6) for a, b in zip(always, torchs, strict=True)),
    ]


@layouts()
def test_several_optimizers(ranks: Any) -> None:
    assert all(found == [True, True] for found in ranks(2, several))


def copies() -> list[str]:
    model = shard(net(torch.float32), flat_mesh())
    with optimizer_of(model) as optimizer:
        return [error_of(lambda: copy.deepcopy(optimizer)), error_of(lambda: pickle.dumps(optimizer))]


@layouts(refused="an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead")
def test_copies_of_the_optimizer(ranks: Any, refusal: Refusal) -> None:
    for errors in ranks(2, copies):
        for error in errors:
            refusal.check(error)


class Odd(Net):
    """With a factor of any shape and memory order."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits * self.scale.sum() if self.scale.numel() else logits


class Mixed(Net):
    """A bfloat16 layer among float32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].bfloat16()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.layers[0](x.bfloat16()).float()
        logits: Tensor = self.head(x + self.layers[1](x)).clone()
        return logits


ODD: dict[str, Callable[[], Net]] = {
    "scalar": lambda: Odd(torch.tensor(0.5)),
    "transposed": lambda: Odd(torch.full((4, 3), 0.1).t()),
    "empty": lambda: Odd(torch.empty(0, 13)),
    "mixed": Mixed,
}


def odd(name: str) -> list[Any]:
    found = []
    for mode in ("always", "never"):
        torch.manual_seed(0)
        model = shard(ODD[name](), flat_mesh())
        with optimizer_of(model, speculation=mode) as optimizer:
            train(model, optimizer, range(8))
            optimizer.zero_grad()
            found.append((optimizer.state_digests(), backward(model, 0).item()))
    return found


def error_of_odd(name: str) -> str:
    return error_of(lambda: odd(name))


SCALAR = "fully_shard doesn't support scalar parameters"
TRANSPOSED = "FSDP does not support non-contiguous parameters yet"
# name, what torch itself says of it where it is sharded
ODD_ROWS = [("empty", None), ("mixed", None), ("scalar", SCALAR), ("transposed", TRANSPOSED)]


def odd_case(name: str, error: str | None, column: str) -> Any:
    refused = None if column == "stages" else error
    return pytest.param(RANKS[column], name, refused, id=f"{name}-{column}")


@pytest.mark.parametrize(("ranks", "name", "refused"), [odd_case(*row, column) for row in ODD_ROWS for column in RANKS])
def test_odd_parameters(ranks: Any, name: str, refused: str | None) -> None:
    if refused:
        assert all(refused in error for error in ranks(2, error_of_odd, name))
    else:
        for always, never in ranks(2, odd, name):
            assert always == never


def masters() -> list[bool]:
    """Loaded as float32, converted, sharded; masters get the float32 bits."""
    loaded = net(torch.float32)
    copies = [p.detach().clone() for p in loaded.parameters()]
    model = shard(loaded.bfloat16(), flat_mesh())
    values = {name: value for (name, _), value in zip(model.named_parameters(), copies, strict=True)}
    with optimizer_of(model) as optimizer:
        optimizer.load_masters(values)
        same = []
        for name, param in model.named_parameters():
            if param.requires_grad:
                same.append(torch.equal(whole(optimizer.state[param]["master"]), values[name]))
        (head,) = (name for name in values if name.endswith("head.weight"))
        bad = {**values, head: values[head] + 1.0 if dist.get_rank() == 0 else values[head][:-1]}
        error = error_of(lambda: optimizer.load_masters(bad))
        train(model, optimizer)
        return [all(same), "head.weight" in error or "rank 1 failed" in error]


@layouts()
def test_masters_keep_the_float32_bits(ranks: Any) -> None:
    assert all(found == [True, True] for found in ranks(2, masters))


def replaced_too_late() -> list[str]:
    """Groups are given other parameters once there is state for those they had."""
    errors = []
    for first in ("step", "masters"):
        model = net(torch.float32)
        with optimizer_of(model, replicated="local") as optimizer:
            if first == "step":
                train(model, optimizer, range(1))
            else:
                optimizer.load_masters({name: p.detach().clone() for name, p in model.named_parameters()})
            other = net(torch.float32, seed=2)
            optimizer.param_groups[0]["params"] = [p for p in other.parameters() if p.requires_grad]
            backward(other, 0)
            errors.append(error_of(optimizer.step))
    return errors


def test_replaced_parameters_whose_state_would_be_lost() -> None:
    for errors in on_ranks(2, replaced_too_late):
        for error in errors:
            assert "StateError" in error and "was taken out and others put in" in error

"""What people do around an optimizer, on a model that fully_shard has sharded: as torch.optim.AdamW doing the same."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from superoffload import AdamW
from tests.support.adamw_training import TorchAdamW
from tests.support.compatibility import Refusal, compat
from tests.support.fsdp2_loops import (
    STEPS,
    Scenario,
    accumulate,
    accumulation,
    add_group,
    autocast,
    averages,
    backward,
    clip_norm,
    clip_value,
    closure,
    edited,
    freezing,
    hooks,
    listed_writes,
    loss_scaling,
    parameter_hooks,
    scaler,
    schedulers,
    train,
    without_gradients,
    writes,
    zeroing,
)
from tests.support.rank_processes import (
    Net,
    error_of,
    flat_mesh,
    net,
    on_mesh,
    on_ranks,
    optimizer_of,
    shard,
    wholes_of,
)


@compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "fsdp2")
def test_writes_by_operations_on_lists() -> None:
    compare(listed_writes)


@compat("every scheduler of torch.optim.lr_scheduler", "fsdp2")
@compat("lr changed between backward and step()", "fsdp2")
def test_schedulers() -> None:
    compare(schedulers)


BATTERY: list[Any] = [
    pytest.param(
        loss_scaling, marks=compat("plain loss scaling: scaled loss, gradients divided before step()", "fsdp2")
    ),
    pytest.param(accumulation, marks=compat("gradient accumulation", "fsdp2")),
    pytest.param(accumulate, marks=compat("gradient accumulation with accumulate()", "fsdp2")),
    pytest.param(clip_norm, marks=compat("clip_grad_norm_ by the user after backward", "fsdp2")),
    pytest.param(clip_value, marks=compat("clip_grad_value_ by the user after backward", "fsdp2")),
    pytest.param(edited, marks=compat("gradients edited, replaced or removed before step()", "fsdp2")),
    pytest.param(zeroing, marks=compat("zero_grad(set_to_none=True or False)", "fsdp2")),
    pytest.param(without_gradients, marks=compat("a step with some or no gradients", "fsdp2")),
    pytest.param(freezing, marks=compat("parameters frozen and unfrozen mid-run", "fsdp2")),
    pytest.param(
        writes, marks=compat("parameters written by the user (load_state_dict, clamp, re-initialization)", "fsdp2")
    ),
    pytest.param(closure, marks=compat("closure", "fsdp2")),
    pytest.param(hooks, marks=compat("optimizer hooks (register_step_pre_hook and its kin)", "fsdp2")),
    pytest.param(parameter_hooks, marks=compat("hooks of parameters that change or read gradients", "fsdp2")),
    pytest.param(averages, marks=compat("EMA and SWA, averages swapped in", "fsdp2")),
]


def run(scenario: Scenario, options: dict[str, Any]) -> dict[str, Any]:
    """In a rank: ours in two modes, and torch's, on the same sharded model."""
    found: dict[str, Any] = {}
    for mode in ("always", "never"):
        model = built(options)
        with optimizer_of_all(model, mode, options) as optimizer:
            scenario(model, optimizer)
            found[mode] = optimizer.state_digests()
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


@pytest.mark.parametrize("scenario", BATTERY)
def test_as_torch(scenario: Scenario) -> None:
    compare(scenario)


ON_A_MESH: dict[Scenario, dict[str, Any]] = {
    **{one.values[0]: {} for one in BATTERY},
    listed_writes: {},
    schedulers: {},
    add_group: {"without_head": True},
    autocast: {"tolerance": 5e-4},
    scaler: {"tolerance": 2e-5},
    train: {"checkpointing": True, "tied": True},
}


@pytest.mark.parametrize("scenario", ON_A_MESH)
def test_as_torch_with_tensor_parallelism(scenario: Scenario) -> None:
    compare(scenario, ranks=on_mesh, **ON_A_MESH[scenario])


@compat("add_param_group at any time", "fsdp2")
def test_add_param_group() -> None:
    compare(add_group, without_head=True)


@compat("autocast", "fsdp2")
def test_autocast() -> None:
    compare(autocast, tolerance=5e-4)


@compat("GradScaler", "fsdp2")
def test_grad_scaler() -> None:
    compare(scaler, tolerance=2e-5)


@compat("activation checkpointing", "fsdp2")
def test_activation_checkpointing() -> None:
    compare(train, checkpointing=True)


@compat("clip_grad_norm_ by the user after backward", "fsdp2")
def test_clipping_twice() -> None:
    """By the user, and by max_grad_norm."""
    compare(clip_norm, max_grad_norm=0.02)


@compat("tied parameters", "fsdp2")
def test_tied() -> None:
    compare(train, tied=True)


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


@compat("several optimizers on one model", "fsdp2")
def test_several_optimizers() -> None:
    assert on_ranks(2, several) == [[True, True]] * 2


def copies() -> list[str]:
    model = shard(net(torch.float32), flat_mesh())
    with optimizer_of(model) as optimizer:
        return [error_of(lambda: copy.deepcopy(optimizer)), error_of(lambda: pickle.dumps(optimizer))]


@compat(
    "copy.deepcopy and pickle of the optimizer",
    "fsdp2",
    refused="an optimizer with worker threads cannot be copied or pickled; save its state_dict() instead",
)
def test_copies_of_the_optimizer(refusal: Refusal) -> None:
    for errors in on_ranks(2, copies):
        for error in errors:
            refusal.check(error)


class Odd(Net):
    """With a parameter of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 13))


def empty_parameter() -> list[str]:
    digests = []
    for mode in ("always", "never"):
        torch.manual_seed(0)
        model = shard(Odd(), flat_mesh())
        with optimizer_of(model, speculation=mode) as optimizer:
            train(model, optimizer)
            digests.append(str(optimizer.state_digests()))
    return digests


@compat("zero-size parameters", "fsdp2")
def test_zero_size_parameters() -> None:
    for always, never in on_ranks(2, empty_parameter):
        assert always == never


class Scaled(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))


def scalar_parameter() -> str:
    return error_of(lambda: fully_shard(Scaled(()), mesh=flat_mesh()))


@compat("scalar parameters", "fsdp2", refused="fully_shard doesn't support scalar parameters")
def test_scalar_parameters(refusal: Refusal) -> None:
    """By torch itself."""
    for error in on_ranks(2, scalar_parameter):
        refusal.check(error)


def transposed() -> str:
    model = Scaled((3, 4))
    model.scale = nn.Parameter(torch.ones(3, 4).t())
    return error_of(lambda: fully_shard(model, mesh=flat_mesh()))


@compat("non-contiguous parameters", "fsdp2", refused="FSDP does not support non-contiguous parameters yet")
def test_non_contiguous_parameters(refusal: Refusal) -> None:
    """By torch itself."""
    for error in on_ranks(2, transposed):
        refusal.check(error)


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


def mixed() -> list[Any]:
    found = []
    for mode in ("always", "never"):
        torch.manual_seed(0)
        model = shard(Mixed(), flat_mesh())
        with optimizer_of(model, speculation=mode) as optimizer:
            before = backward(model, 0).item()
            train(model, optimizer, range(8))
            optimizer.zero_grad()
            found.append((optimizer.state_digests(), before, backward(model, 0).item()))
    return found


@compat("mixed float32, bfloat16 and float16 parameters", "fsdp2")
def test_mixed_dtypes() -> None:
    for (always, before, after), (never, *_) in on_ranks(2, mixed):
        assert always == never and after < before


def masters() -> list[bool]:
    """Loaded as float32, converted, sharded; masters get the float32 bits."""
    whole = net(torch.float32)
    values = {name: p.detach().clone() for name, p in whole.named_parameters()}
    model = shard(whole.bfloat16(), flat_mesh())
    with optimizer_of(model) as optimizer:
        optimizer.load_masters(values)
        same = []
        for name, param in model.named_parameters():
            if param.requires_grad:
                master: Any = optimizer.state[param]["master"]
                same.append(torch.equal(master.full_tensor(), values[name]))
        bad = {**values, "head.weight": values["head.weight"] + (1.0 if dist.get_rank() else 0.0)}
        error = error_of(lambda: optimizer.load_masters(bad))
        train(model, optimizer)
        return [all(same), "head.weight" in error or "rank 1 failed" in error]


@compat("a model loaded as float32 and converted to bfloat16; masters keep the float32 bits", "fsdp2")
def test_masters_keep_the_float32_bits() -> None:
    assert on_ranks(2, masters) == [[True, True]] * 2


def compiled_step() -> list[bool]:
    digests = []
    for compiled in (True, False):
        model = shard(net(torch.float32), flat_mesh())
        with optimizer_of(model) as optimizer:
            step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
            for seed in range(2):
                optimizer.zero_grad()
                backward(model, seed)
                step()
            digests.append(optimizer.state_digests())
    return [digests[0] == digests[1]]


def test_a_compiled_step() -> None:
    assert on_ranks(2, compiled_step) == [[True]] * 2


def undone_while_accumulating(speculation: str) -> tuple[float, float]:
    """In a rank: buckets undone and speculated; all gradients of a layer share one version counter."""
    model = built({})
    with optimizer_of_all(model, speculation, {}) as optimizer:
        accumulate(model, optimizer)
        stats = optimizer.stats()
    return stats["buckets_undone"], stats["buckets_speculated"]


def test_accumulated_gradients_are_not_taken_for_edited_ones() -> None:
    for undone, speculated in on_ranks(2, undone_while_accumulating, "always"):
        assert undone == 0 < speculated

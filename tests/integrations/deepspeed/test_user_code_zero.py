"""What people do around an optimizer, under DeepSpeed ZeRO: as stock ZeRO-Offload, or refused with a clear error."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload.errors import StateError
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import CLIP_SOME, WAYS, Scenario, distance
from tests.support.deepspeed.training import OURS, Small, batch, config, end, make_engine, masters, plain, run_steps
from tests.support.optional_packages import needs

STEPS = 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.middle: nn.Module = nn.Linear(32, 32)
        self.head = nn.Linear(32, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits = self.head(x + torch.tanh(self.middle(x))).float()
        return nn.functional.cross_entropy(logits.view(-1, 61), targets.view(-1))


class Experts(nn.Module):
    """Uses one expert per forward pass; the others get no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        chosen: Tensor = self.experts[self.calls % 3](x)
        return chosen


class Reentrant(Small):
    def forward(self, tokens: Tensor, targets: Tensor, use_extra: bool = True) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        logits = self.head(x + self.extra(x)).float()
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def leaf_modules(_: dict[str, Any]) -> nn.Module:
    from deepspeed.utils import set_z3_leaf_modules

    model = Tied()
    model.middle = Experts()
    set_z3_leaf_modules(model, [Experts])
    return model


def zero_init(configuration: dict[str, Any]) -> nn.Module:
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=configuration):
        return Small()


def lora(_: dict[str, Any]) -> nn.Module:
    import peft

    model: nn.Module = peft.get_peft_model(Small(), peft.LoraConfig(r=4, target_modules=["extra", "head"]))
    return model


def steps(engine: Any, way: str) -> None:
    run_steps(engine, range(STEPS))


def compiled(engine: Any, way: str) -> None:
    if way != "stock":  # so that stock is eager mode too
        engine.compile()
    steps(engine, way)


def autocast(engine: Any, way: str) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        steps(engine, way)


def schedulers_and_hooks(engine: Any, way: str) -> None:
    """Schedulers of torch on the optimizer that the engine was given: the learning rate changes between backward and
    step. A hook on activations changes their gradients."""
    from tests.support.schedulers import SCHEDULERS

    engine.module.head.register_full_backward_hook(lambda _, grads, __: (2.0 * grads[0],))
    inner = engine.optimizer.optimizer
    for step, (name, make) in enumerate(SCHEDULERS.items()):
        for group in inner.param_groups:
            group["lr"], group["betas"] = 1e-3, (0.9, 0.999)
            for key in ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"):
                group.pop(key, None)
        scheduler = make(inner)
        engine.backward(plain(engine, step, 0))
        scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
        engine.step()


CASES: dict[str, tuple[Any, Any, float, float]] = {  # model, loop, clipping, tolerance
    "schedulers and hooks": (lambda _: Small(), schedulers_and_hooks, 0.0, 1e-4),
    "autocast": (lambda _: Small(), autocast, 0.0, 5e-2),
    "tied": (lambda _: Tied(), steps, 50.0, 1e-4),
    "lora": (lora, steps, 0.0, 1e-4),
    "reentrant checkpointing": (lambda _: Reentrant(), steps, 2.0, 1e-3),
    "leaf modules": (leaf_modules, steps, 50.0, 1e-3),
    "zero.Init": (zero_init, steps, 2.0, 1e-3),
    "compile": (lambda _: Small(depth=1), compiled, 2.0, 1e-3),
}
MARKS: dict[str, Any] = {"lora": needs("peft"), "compile": pytest.mark.in_turn}
OF_STAGE_3 = ("leaf modules", "zero.Init")
BOTH = [(case, stage) for stage in (3, 2) for case in CASES if stage == 3 or case not in OF_STAGE_3]


def train(case: str, way: str, stage: int) -> Any:
    import superoffload.integrations.deepspeed as ours

    make, use, clip, _ = CASES[case]
    offload, options = WAYS[way]
    configuration = config(offload, options=options, precision="fp32", clip=clip, zero={"stage": stage})
    torch.manual_seed(1)
    ours.enable()  # before zero.Init, which reads the config too
    engine = make_engine(configuration, make(configuration))
    use(engine, way)
    ours_only = () if way == "stock" else (engine.optimizer.state_digests(), engine.optimizer.stats())
    found = masters(engine), *ours_only
    end(engine)
    return found


@pytest.mark.parametrize(
    ("case", "stage"), [pytest.param(case, stage, marks=MARKS.get(case, ())) for case, stage in BOTH]
)
def test_as_stock(case: str, stage: int, two_ranks: Ranks) -> None:
    ways = ("stock", "match", "match, waiting")
    stock, always, never = (two_ranks.run(train, case, way, stage, timeout=200) for way in ways)
    for (expected,), (found, digests, stats), (_, waited, _) in zip(stock, always, never, strict=True):
        assert digests == waited and stats["buckets_speculated"] > 0
        assert distance(expected, found) < CASES[case][3]  # a wrong step is off by a tenth and more


def _engine(seed: int = 1, clip: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return make_engine(config(options=options, clip=clip), Small())


def two_engines() -> None:
    """Actor and critic, their steps interleaved, and each alone."""
    kinds = ((1, 2.0), (2, 0.0))
    options = {"speculation": "always", "delivery": "on_demand"}
    engines = [_engine(seed, clip, **options) for seed, clip in kinds]
    for step in range(4):
        losses = [engine(*batch(step)) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    together = [engine.optimizer.state_digests() for engine in engines]
    for engine in engines:
        end(engine)
    for (seed, clip), expected in zip(kinds, together, strict=True):
        engine = _engine(seed, clip, **options)
        run_steps(engine, range(4))
        assert engine.optimizer.state_digests() == expected
        end(engine)


def left_behind() -> None:
    """No fp32 gradient, as stock makes; nothing of an engine that was destroyed, whose hooks DeepSpeed keeps."""
    engine = _engine(clip=1.0, speculation="always")
    optimizer = engine.optimizer

    def look(*_: Any) -> None:
        assert all(flat.grad is None for flat in optimizer.fp32_partitioned_groups_flat)

    run_steps(engine, range(2), before_step=look)
    master = optimizer.fp32_partitioned_groups_flat[0]
    state = optimizer.optimizer.state[master]
    held = [optimizer.grad_partitions_flat_buffer, master, state["exp_avg"], state["exp_avg_sq"]]
    held += [bucket.shadow for bucket in optimizer.parts.driver.engine.buckets]
    known = [weakref.ref(tensor) for tensor in held]
    assert len(known) > 5
    del master, state, held
    optimizer.close()  # twice does no harm
    end(engine)
    gc.collect()
    assert [number for number, tensor in enumerate(known) if tensor() is not None] == []
    assert all(param.ds_tensor.numel() for param in engine.module.parameters())
    with pytest.raises(StateError, match="was destroyed"):
        optimizer.stats()


def train_with_late_gradients(late: bool, stage: int) -> dict[str, str]:
    """Where gradients are still being copied when those of the next backward come."""
    from deepspeed.accelerator import get_accelerator

    scenario = Scenario({"clip": CLIP_SOME, "zero": {"stage": stage}}, micros=2, one_step_call=True)
    calls: Counter[int] = Counter()
    accelerator = mock.Mock(wraps=get_accelerator())  # only ours sees it
    accelerator.is_synchronized_device.return_value = not late
    accelerator.Event.side_effect = lambda: mock.Mock(query=lambda: False)
    with (
        mock.patch("superoffload.integrations.deepspeed.zero.gradients.get_accelerator", lambda: accelerator),
        mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None),
    ):
        engine = scenario.engine(OURS, {"speculation": "always"})
        driver = engine.optimizer.parts.driver
        final = driver.final

        def counted(partition: Any, **kwargs: Any) -> None:
            calls[partition.key] += 1
            final(partition, **kwargs)

        driver.final = counted
        scenario.train(engine, range(3))
        digests: dict[str, str] = engine.optimizer.state_digests()
    end(engine)
    assert not late or set(calls.values()) == {3}, "a gradient was handed over while the next one was being copied"
    return digests


@pytest.mark.parametrize("stage", [2, 3])
def test_only_the_last_gradient_is_final(stage: int, two_ranks: Ranks) -> None:
    late, at_once = (two_ranks.run(train_with_late_gradients, late, stage) for late in (True, False))
    assert late == at_once


def frozen_for_a_while(way: str) -> dict[str, str]:
    engine = Scenario({"clip": 0.75}).engine(*WAYS[way])
    param = engine.module.dots[2].weight

    def run(numbers: range, frozen: tuple[int, ...] = ()) -> Tensor:
        for step in numbers:
            engine.backward(engine(step, 0, frozen))
            engine.step()
        param.requires_grad_(True)
        return masters(engine)["dots.2.weight"]

    before = run(range(2))
    param.requires_grad_(False)
    meanwhile = run(range(2, 4), (2,))
    assert torch.equal(before, meanwhile) and not torch.equal(meanwhile, run(range(4, 6)))
    digests: dict[str, str] = engine.optimizer.state_digests()
    end(engine)
    return digests


def test_frozen_and_unfrozen(two_ranks: Ranks) -> None:
    assert two_ranks.run(frozen_for_a_while, "ours") == two_ranks.run(frozen_for_a_while, "ours, waiting")


def converted() -> None:
    """Every parameter is made the engine's dtype; masters get the float32 bits that they had."""
    from deepspeed.utils import safe_set_full_fp32_param

    torch.manual_seed(1)
    model = Small()
    model.head.bfloat16()
    values = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    engine = make_engine(config(options={"speculation": "always"}), model)
    assert {param.dtype for param in engine.module.parameters()} == {torch.bfloat16}
    even = {name: param for name, param in engine.module.named_parameters() if param.ds_numel % 2 == 0}
    for name, param in even.items():  # DeepSpeed's function cannot do those that are padded
        safe_set_full_fp32_param(param, values[name])
    found = masters(engine)
    assert len(even) > 3 and all(torch.equal(found[name], values[name]) for name in even)
    run_steps(engine, range(2))
    end(engine)


# ---- refused ---------------------------------------------------------------------------------------------------------


def clip_norm(engine: Any) -> None:
    from torch.nn.utils import clip_grad_norm_

    engine.backward(plain(engine, 0, 0))
    clip_grad_norm_(engine.module.parameters(), 1.0)


def clip_value(engine: Any) -> None:
    engine.backward(plain(engine, 0, 0))
    nn.utils.clip_grad_value_(engine.module.parameters(), 1.0)


def add_group(engine: Any) -> None:
    engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def closure(engine: Any) -> None:
    engine.backward(plain(engine, 0, 0))
    engine.optimizer.step(lambda: 0.0)


def step_hook(engine: Any) -> None:
    hook = engine.optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    engine.backward(plain(engine, 0, 0))
    try:
        engine.step()
    finally:
        hook.remove()


def our_checkpoint(engine: Any) -> None:
    from superoffload import checkpoints

    checkpoints.save("nowhere", engine.module, engine.optimizer)


def torchs_checkpoint(engine: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    get_optimizer_state_dict(engine.module, engine.optimizer)


NO_CLIP = 'this would clip nothing; set "gradient_clipping" in the DeepSpeed JSON'
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (clip_norm, NO_CLIP),
    (clip_value, NO_CLIP),
    (add_group, "has no attribute 'add_param_group'"),
    (closure, "closures are not supported, as in DeepSpeed"),
    (step_hook, "step hooks are not called under DeepSpeed; do around engine.step() what they do"),
    (lambda engine: copy.deepcopy(engine.optimizer), "cannot be copied or pickled; use engine.save_checkpoint()"),
    (lambda engine: pickle.dumps(engine.optimizer), "cannot be copied or pickled; use engine.save_checkpoint()"),
    (torchs_checkpoint, "DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()"),
    (our_checkpoint, "expected superoffload.AdamW or torch.optim.AdamW; use engine.save_checkpoint()"),
]


def refused(stage: int = 3) -> None:
    """The engine trains on after each error."""
    engine = make_engine(config(options={"speculation": "always"}, zero={"stage": stage}), Small())
    for use, words in REFUSED:
        with pytest.raises(Exception) as caught:
            use(engine)
        assert words in str(caught.value), (words, str(caught.value))
        engine.backward(engine(*batch(1)))
        engine.step()
    end(engine)


def refused_in_stage_2() -> None:
    refused(2)


@pytest.mark.parametrize(
    "case", [two_engines, left_behind, converted, refused, refused_in_stage_2], ids=lambda case: case.__name__
)
def test_what_each_rank_checks(case: Callable[[], None], two_ranks: Ranks) -> None:
    two_ranks.run(case)


class Odd(Small):
    """With a parameter that DeepSpeed itself cannot take."""

    def __init__(self, odd: Tensor) -> None:
        super().__init__()
        self.odd = nn.Parameter(odd)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + self.odd.sum()


def refused_by_deepspeed(odd: Tensor, words: str) -> None:
    engine = None
    with pytest.raises(Exception) as caught:
        engine = make_engine(config(), Odd(odd))
        plain(engine, 0, 0)
    assert words in str(caught.value)
    if engine is not None:
        end(engine)


def test_parameters_that_deepspeed_itself_refuses(two_ranks: Ranks) -> None:
    for odd, words in (
        (torch.empty(0, 3), "'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0"),
        (torch.tensor(1.0), "self.dim() cannot be 0 to view"),
        (torch.ones(4, 3).t(), "self.stride(-1) must be 1 to view"),
    ):
        two_ranks.run(refused_by_deepspeed, odd, words)

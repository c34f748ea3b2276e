"""What people do around an optimizer, under DeepSpeed ZeRO-3: as stock ZeRO-Offload, or refused with a clear error."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.scenarios import WAYS, Scenario, distance
from tests.support.deepspeed.training import Small, batch, config, end, make_engine, masters, plain, run_steps
from tests.support.optional_packages import needs

STEPS = 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 61, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + torch.tanh(self.middle(x))
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.view(-1, 61), targets.view(-1))


def steps(engine: Any) -> None:
    run_steps(engine, range(STEPS))


def autocast(engine: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        steps(engine)


def schedulers_and_hooks(engine: Any) -> None:
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


def lora() -> nn.Module:
    import peft

    model: nn.Module = peft.get_peft_model(Small(), peft.LoraConfig(r=4, target_modules=["extra", "head"]))
    return model


def train(make: Callable[[], nn.Module], use: Callable[[Any], None], clip: float, way: str) -> Any:
    torch.manual_seed(1)
    offload, options = WAYS[way]
    engine = make_engine(config(offload, options=options, precision="fp32", clip=clip), make())
    use(engine)
    if way == "stock":
        found = masters(engine), None, 0
    else:
        optimizer = engine.optimizer
        found = masters(engine), optimizer.state_digests(), optimizer.stats()["buckets_speculated"]
    end(engine)
    return found


CASES: list[Any] = [
    pytest.param(Small, schedulers_and_hooks, 0.0, 1e-4, id="schedulers and hooks"),
    pytest.param(Small, autocast, 0.0, 5e-2, id="autocast"),
    pytest.param(Tied, steps, 50.0, 1e-4, id="tied"),
    pytest.param(lora, steps, 0.0, 1e-4, id="lora", marks=needs("peft")),
]


@pytest.mark.parametrize(("make", "use", "clip", "tolerance"), CASES)
def test_as_stock(make: Any, use: Any, clip: float, tolerance: float, two_ranks: Ranks) -> None:
    stock, always, never = (two_ranks.run(train, make, use, clip, way) for way in ("stock", "match", "match, waiting"))
    for (expected, *_), (found, digests, speculated), (_, waited, _) in zip(stock, always, never, strict=True):
        assert digests == waited and speculated > 0
        assert distance(expected, found) < tolerance  # a wrong step is off by a tenth and more


def warnings_of_a_scheduler(way: str) -> tuple[list[str], list[float]]:
    """One of torch's, called by DeepSpeed; it warns where no loop has called the optimizer's ``step()``."""
    torch.manual_seed(1)
    offload, options = WAYS[way]
    configuration, model = config(offload, options=options), Small()
    del configuration["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    engine = make_engine(configuration, model, optimizer=optimizer, lr_scheduler=scheduler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = run_steps(engine, range(2))
    end(engine)
    return [str(one.message) for one in caught if "lr_scheduler" in str(one.message)], [lr for (lr,) in record["lrs"]]


def test_a_scheduler_does_not_warn(two_ranks: Ranks) -> None:
    for warned, rates in two_ranks.run(warnings_of_a_scheduler, "ours"):
        assert not warned
        assert rates == pytest.approx([1e-2 / 2, 1e-2 / 3])


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


def test_one_dtype_and_masters_of_float32(two_ranks: Ranks) -> None:
    two_ranks.run(converted)


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


def refused() -> None:
    """The engine trains on after each error."""
    engine = make_engine(config(options={"speculation": "always"}), Small())
    for use, words in REFUSED:
        with pytest.raises(Exception) as caught:
            use(engine)
        assert words in str(caught.value)
        engine.backward(engine(*batch(1)))
        engine.step()
    end(engine)


def test_refused(two_ranks: Ranks) -> None:
    two_ranks.run(refused)


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

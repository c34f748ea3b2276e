"""What people do around an optimizer and what ZeRO-3 cannot do: refused with a clear error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.compatibility import Refusal, compat
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.training import Small, batch, config, end, make_engine, plain


class Empty(Small):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + self.empty.sum()


def error_of_empty() -> str:
    engine = make_engine(config(), Empty())
    with pytest.raises(Exception) as caught:
        plain(engine, 0, 0)
    end(engine)
    return str(caught.value)


@compat("zero-size parameters", "deepspeed", refused="'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0")
def test_zero_size_parameters(refusal: Refusal, two_ranks: Ranks) -> None:
    """By DeepSpeed itself."""
    for error in two_ranks.run(error_of_empty):
        refusal.check(error)


class Scalar(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Transposed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 3).t())


def error_with(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(Exception) as caught:
        make_engine(config(), make())
    return str(caught.value)


@compat("scalar parameters", "deepspeed", refused="self.dim() cannot be 0 to view")
def test_scalar_parameters(refusal: Refusal, two_ranks: Ranks) -> None:
    """By DeepSpeed itself."""
    for error in two_ranks.run(error_with, Scalar):
        refusal.check(error)


@compat("non-contiguous parameters", "deepspeed", refused="self.stride(-1) must be 1 to view")
def test_non_contiguous_parameters(refusal: Refusal, two_ranks: Ranks) -> None:
    """By DeepSpeed itself."""
    for error in two_ranks.run(error_with, Transposed):
        refusal.check(error)


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
    engine.optimizer.optimizer.register_step_pre_hook(lambda *_: None)
    engine.backward(plain(engine, 0, 0))
    engine.step()


def deep_copy(engine: Any) -> None:
    with pytest.raises(Exception, match="cannot be copied or pickled"):
        pickle.dumps(engine.optimizer)
    copy.deepcopy(engine.optimizer)


def our_checkpoint(engine: Any) -> None:
    from superoffload import checkpoints

    checkpoints.save("nowhere", engine.module, engine.optimizer)


def torchs_checkpoint(engine: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    get_optimizer_state_dict(engine.module, engine.optimizer)


def said(use: Callable[[Any], None]) -> str:
    """The error that ``use`` must raise; the engine trains on after it."""
    engine = make_engine(config(options={"speculation": "always"}), Small())
    try:
        with pytest.raises(Exception) as caught:
            use(engine)
        engine.optimizer.optimizer._optimizer_step_pre_hooks.clear()
        engine.backward(engine(*batch(1)))
        engine.step()
    finally:
        end(engine)
    return str(caught.value)


OURS_ONLY = "SpeculativeStage3, expected superoffload.AdamW or torch.optim.AdamW; use engine.save_checkpoint()"
NO_TORCH = "DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()"
REFUSED: list[Any] = [
    pytest.param(
        clip_norm,
        marks=compat(
            "clip_grad_norm_ by the user after backward",
            "deepspeed",
            refused='this would clip nothing; set "gradient_clipping" in the DeepSpeed JSON',
        ),
    ),
    pytest.param(
        clip_value,
        marks=compat(
            "clip_grad_value_ by the user after backward",
            "deepspeed",
            refused='this would clip nothing; set "gradient_clipping" in the DeepSpeed JSON',
        ),
    ),
    pytest.param(
        add_group,
        marks=compat("add_param_group at any time", "deepspeed", refused="has no attribute 'add_param_group'"),
    ),
    pytest.param(closure, marks=compat("closure", "deepspeed", refused="closures are not supported, as in DeepSpeed")),
    pytest.param(
        step_hook,
        marks=compat(
            "optimizer hooks (register_step_pre_hook and its kin)",
            "deepspeed",
            refused="step hooks are not called under DeepSpeed; do around engine.step() what they do",
        ),
    ),
    pytest.param(
        deep_copy,
        marks=compat(
            "copy.deepcopy and pickle of the optimizer",
            "deepspeed",
            refused="an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()",
        ),
    ),
    pytest.param(
        torchs_checkpoint,
        marks=[
            compat("torch.distributed.checkpoint, with another number of ranks", "deepspeed", refused=NO_TORCH),
            compat("get_optimizer_state_dict and set_optimizer_state_dict", "deepspeed", refused=NO_TORCH),
        ],
    ),
    pytest.param(
        our_checkpoint,
        marks=[
            compat("killed while it saves: the checkpoint before loads", "deepspeed", refused=OURS_ONLY),
            compat("a truncated, bit-flipped or foreign checkpoint", "deepspeed", refused=OURS_ONLY),
            compat("saved in the background while training goes on", "deepspeed", refused=OURS_ONLY),
        ],
    ),
]


@pytest.mark.parametrize("use", REFUSED)
def test_refused(use: Callable[[Any], None], refusal: Refusal, two_ranks: Ranks) -> None:
    for error in two_ranks.run(said, use):
        refusal.check(error)

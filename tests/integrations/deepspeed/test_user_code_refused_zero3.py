"""What is refused with a clear error: what ZeRO-3 cannot do of what people do around an optimizer, arguments of the
optimizer before it is built. And DeepSpeed's own kernel, which is built for others only."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed.features import check_arguments, check_optimizer
from superoffload.integrations.deepspeed.lazy_adam import lazy_builder
from tests.support.deepspeed.ranks import Ranks
from tests.support.deepspeed.training import Small, batch, config, end, make_engine, plain
from tests.support.refusal import Refusal


class Odd(Small):
    """``shape``: of a parameter that DeepSpeed itself cannot take."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(1.0), "transposed": torch.ones(4, 3).t()}
        self.odd = nn.Parameter(odd[shape])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) + self.odd.sum()


def error_of(shape: str) -> str:
    engine = None
    with pytest.raises(Exception) as caught:
        engine = make_engine(config(), Odd(shape))
        plain(engine, 0, 0)
    if engine is not None:
        end(engine)
    return str(caught.value)


SHAPES = {
    "empty": "'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0",
    "scalar": "self.dim() cannot be 0 to view",
    "transposed": "self.stride(-1) must be 1 to view",
}


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, marks=pytest.mark.refused(words)) for shape, words in SHAPES.items()],
)
def test_refused_by_deepspeed_itself(shape: str, refusal: Refusal, two_ranks: Ranks) -> None:
    for error in two_ranks.run(error_of, shape):
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


NO_CLIP = 'this would clip nothing; set "gradient_clipping" in the DeepSpeed JSON'
REFUSED: dict[Callable[[Any], None], str] = {
    clip_norm: NO_CLIP,
    clip_value: NO_CLIP,
    add_group: "has no attribute 'add_param_group'",
    closure: "closures are not supported, as in DeepSpeed",
    step_hook: "step hooks are not called under DeepSpeed; do around engine.step() what they do",
    deep_copy: "an optimizer with worker threads cannot be copied or pickled; use engine.save_checkpoint()",
    torchs_checkpoint: "DeepSpeed's optimizer is no torch.optim.Optimizer; use engine.save_checkpoint()",
    our_checkpoint: "SpeculativeStage3, expected superoffload.AdamW or torch.optim.AdamW; use engine.save_checkpoint()",
}


@pytest.mark.parametrize(
    "use",
    [pytest.param(use, marks=pytest.mark.refused(words)) for use, words in REFUSED.items()],
)
def test_refused(use: Callable[[Any], None], refusal: Refusal, two_ranks: Ranks) -> None:
    for error in two_ranks.run(said, use):
        refusal.check(error)


ARGUMENTS: dict[str, tuple[Any, str]] = {
    "zenflow_config": (object(), "ZenFlow"),
    "all2all_process_group": (object(), "quantized gradients"),
    "zero_hpz_partition_size": (2, "expected 1"),
    "zero_quantized_weights": (True, "quantized weights"),
    "zero_quantized_nontrainable_weights": (True, "quantized weights"),
    "fp16_master_weights_and_gradients": (True, "master weights are fp32"),
    "bf16_master_weights_and_gradients": (True, '"master_dtype": "split"'),
    "bf16_optimizer_states": (True, '"state_dtype": "bf16"'),
    "elastic_checkpoint": (True, "universal checkpoints"),
    "mpu": (SimpleNamespace(), "model parallelism is not supported"),
    "gradient_accumulation_dtype": (torch.float64, "expected fp32, bf16 or fp16"),
}


def test_refused_arguments() -> None:
    check_arguments({"zero_hpz_partition_size": 1, "mpu": SimpleNamespace(initialize_sequence_parallel=None)})
    for name, (value, words) in ARGUMENTS.items():
        with pytest.raises(ArgumentError, match=words):
            check_arguments({name: value})


class CPUAdam(torch.optim.Adam):
    """Stands in for DeepSpeedCPUAdam."""

    def __init__(self, params: Any, lr: float, fp32_optimizer_states: bool = True) -> None:
        super().__init__(params, lr=lr)
        self.fp32_optimizer_states = fp32_optimizer_states


class Own(torch.optim.AdamW):
    """May step differently."""


def test_refused_optimizers() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    for allowed in (torch.optim.Adam, torch.optim.AdamW, CPUAdam):
        check_optimizer(allowed([param], lr=1e-3), CPUAdam)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (torch.optim.SGD, {}, 'optimizer SGD: expected.*set "offload_optimizer": {"device": "cpu"}'),
        (Own, {}, "optimizer Own: expected"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True: expected False"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True: expected False"),
        (CPUAdam, {"fp32_optimizer_states": False}, '"state_dtype": "bf16"} instead'),
    ]
    for kind, options, words in refused:
        with pytest.raises(ArgumentError, match=words):
            check_optimizer(kind([param], lr=1e-3, **options), CPUAdam)


class Builder:
    """Stands in for DeepSpeed's, whose load() compiles."""

    built = 0

    def load(self) -> Any:
        Builder.built += 1
        return mock.Mock()


def test_the_kernel_is_built_for_the_first_who_calls_it() -> None:
    """A stock engine beside ours: its optimizer, made before the kernel was there, is known to the kernel."""
    kernel: Any = lazy_builder(Builder)().load()
    kernel.create_adam(0, 1e-3, "ours")
    kernel.create_adam(1, 1e-3, "stock")
    kernel.destroy_adam(0)
    with pytest.raises(AttributeError):
        assert kernel.__wrapped__, "who only looks at it builds nothing"
    assert Builder.built == 0
    kernel.adam_update(1, 5)
    kernel.create_adam(2, 1e-3, "later")
    kernel.destroy_adam(1)
    assert Builder.built == 1
    assert kernel._kernel.mock_calls == [
        mock.call.create_adam(1, 1e-3, "stock"),
        mock.call.adam_update(1, 5),
        mock.call.create_adam(2, 1e-3, "later"),
        mock.call.destroy_adam(1),
    ]


def test_the_environment_is_checked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from superoffload.integrations.deepspeed.stage3.optimizer import SpeculativeStage3

    monkeypatch.setenv("SUPEROFFLOAD_DEVICE_TIMEOUT", "soon")
    with pytest.raises(ArgumentError, match="SUPEROFFLOAD_DEVICE_TIMEOUT='soon': expected a number"):
        SpeculativeStage3(None, None, None, None, {})

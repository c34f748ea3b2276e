"""What the optimizer refuses before it is built, and DeepSpeed's own kernel, which is built for others only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from superoffload.errors import ArgumentError
from superoffload.integrations.deepspeed.features import check_arguments, check_optimizer
from superoffload.integrations.deepspeed.lazy_adam import lazy_builder


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"zenflow_config": object()}, "ZenFlow"),
        ({"all2all_process_group": object()}, "quantized gradients"),
        ({"zero_hpz_partition_size": 2}, "expected 1"),
        ({"zero_quantized_weights": True}, "quantized weights"),
        ({"zero_quantized_nontrainable_weights": True}, "quantized weights"),
        ({"fp16_master_weights_and_gradients": True}, "master weights are fp32"),
        ({"bf16_master_weights_and_gradients": True}, '"master_dtype": "split"'),
        ({"bf16_optimizer_states": True}, '"state_dtype": "bf16"'),
        ({"elastic_checkpoint": True}, "universal checkpoints"),
        ({"mpu": SimpleNamespace()}, "model parallelism is not supported"),
        ({"gradient_accumulation_dtype": torch.float64}, "expected fp32, bf16 or fp16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_arguments(given: dict[str, Any], words: str) -> None:
    check_arguments({"zero_hpz_partition_size": 1, "mpu": SimpleNamespace(initialize_sequence_parallel=None)})
    with pytest.raises(ArgumentError, match=words):
        check_arguments(given)


class CPUAdam(torch.optim.Adam):
    """Stands in for DeepSpeedCPUAdam."""

    def __init__(self, params: Any, lr: float, fp32_optimizer_states: bool = True) -> None:
        super().__init__(params, lr=lr)
        self.fp32_optimizer_states = fp32_optimizer_states


class Own(torch.optim.AdamW):
    """May step differently."""


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.SGD, {}, 'optimizer SGD: expected.*set "offload_optimizer": {"device": "cpu"}'),
        (Own, {}, "optimizer Own: expected"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad=True: expected False"),
        (torch.optim.AdamW, {"maximize": True}, "maximize=True: expected False"),
        (CPUAdam, {"fp32_optimizer_states": False}, '"state_dtype": "bf16"} instead'),
    ],
)
def test_refused_optimizers(kind: Any, options: dict[str, Any], words: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    for allowed in (torch.optim.Adam, torch.optim.AdamW, CPUAdam):
        check_optimizer(allowed([param], lr=1e-3), CPUAdam)
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
        kernel.__wrapped__  # noqa: B018  (who only looks at it builds nothing)
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

"""Keyword arguments that do not exist: the error names them, what was meant, and what there is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import superoffload
from superoffload.errors import ArgumentError, UnknownArgument


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(4))]


CLIPPING = ["grad_clip", "max_norm", "clip_grad_norm", "gradient_clipping", "clip_grad", "gradient_clip_val", "clip",
            "clip_norm", "max_gradient_norm", "grad_norm", "max_grad_norms"]  # fmt: skip


@pytest.mark.parametrize("name", CLIPPING)
def test_every_name_of_clipping_leads_to_max_grad_norm(name: str) -> None:
    with pytest.raises(UnknownArgument, match=rf"^{name}=1.5: no such argument; did you mean max_grad_norm, "):
        superoffload.AdamW(params(), **{name: 1.5})  # type: ignore[arg-type]
    with pytest.raises(UnknownArgument, match=r"this one does not clip: call torch.nn.utils.clip_grad_norm_"):
        superoffload.CPUAdamW(params(), **{name: 1.5})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, meant",
    [
        ("learning_rate", "lr"),
        ("weightdecay", "weight_decay"),
        ("wd", "weight_decay"),
        ("beta1", "betas"),
        ("epsilon", "eps"),
        ("num_threads", "threads"),
        ("bucket_size", "bucket_numel"),
        ("trace_file", "trace"),
        ("keep_grad", "keep_grads"),
    ],
)
def test_the_nearest_argument_is_named(name: str, meant: str) -> None:
    with pytest.raises(UnknownArgument, match=rf"{name}=3: no such argument; did you mean {meant}\?"):
        superoffload.AdamW(params(), **{name: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, said",
    [
        ("adamw_mode", r"AdamW is what you get here; plain Adam is CPUAdamW\(l2=True\)"),
        ("bias_correction", "always corrected"),
        ("fp32_optimizer_states", 'state_dtype is "fp32" or "bf16"'),
    ],
)
def test_what_deepspeeds_has_is_known(name: str, said: str) -> None:
    with pytest.raises(UnknownArgument, match=rf"{name}=True: no such argument; DeepSpeedCPUAdam has it .*{said}"):
        superoffload.CPUAdamW(params(), **{name: True})  # type: ignore[arg-type]


def test_the_error_is_of_both_kinds_and_lists_everything() -> None:
    both: list[Any] = [superoffload.AdamW, superoffload.CPUAdamW]
    for optimizer in both:
        with pytest.raises(UnknownArgument) as caught:
            optimizer(params(), zebra=params(), fused=True)
        assert isinstance(caught.value, ArgumentError) and isinstance(caught.value, TypeError)
        message = str(caught.value)
        assert "zebra=<list>: no such argument; nothing here has a similar name." in message
        assert "fused=True: no such argument; torch.optim.AdamW has it" in message
        accepted = list(inspect.signature(optimizer).parameters)[:-1]
        assert message.endswith(f"{optimizer.__name__} accepts {', '.join(accepted)}")

"""What a plan prints to paste is run as it is: one process, and two ranks over gloo."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superoffload.engine.placement import check_placement
from superoffload.tools.plan.configuration import configuration, configuration_notes
from superoffload.tools.plan.memory_estimate import Settings
from superoffload.tools.plan.plan_report import assumptions
from superoffload.tools.plan.profiles import GH200_96
from tests.support.rank_processes import on_ranks

ONE = [Settings(engine, accumulation=steps) for engine in ("torch", "superoffload") for steps in (1, 3)]
SEVERAL = [
    Settings(engine, sharding, ranks=2, accumulation=steps, checkpointing=checkpointing)
    for engine in ("torch", "superoffload")
    for sharding, steps, checkpointing in (("none", 2, "none"), ("fsdp2", 1, "none"), ("fsdp2", 2, "full"))
]


class Toy(nn.Module):
    """Like a model of Hugging Face, as far as the configurations use one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4)
        self.recomputes = False

    def gradient_checkpointing_enable(self) -> None:
        self.recomputes = True

    def forward(self, batch: Tensor) -> Any:
        x = batch.to(self.head.weight.dtype)
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return SimpleNamespace(loss=self.head(x).float().square().mean())


def names_for(settings: Settings) -> dict[str, Any]:
    """What a configuration expects to be there."""
    torch.manual_seed(0)
    model = Toy()
    batches = [torch.randn(4, 8) for _ in range(settings.accumulation)]
    return {"model": model, "batch": batches[0], "micro_batches": batches}


def run(settings: Settings) -> tuple[float, bool, str]:
    """(how far one step moved a parameter, whether recomputing is on, the dtype of the parameters)."""
    names = names_for(settings)
    module = names["model"]
    before = module.head.weight.detach().clone()
    exec(configuration(settings), names)
    optimizer = names["optimizer"]
    after = module.head.weight.detach()
    after = after.full_tensor() if isinstance(after, DTensor) else after
    dtype = str(after.dtype)
    if hasattr(optimizer, "close"):
        assert optimizer.stats()["steps"] == 1 and optimizer.max_grad_norm == 1.0
        optimizer.close()
    return (after.float() - before).abs().max().item(), module.recomputes, dtype


def check(settings: Settings, found: tuple[float, bool, str]) -> None:
    moved, recomputes, dtype = found
    assert 1e-4 < moved < 1e-2, "the first step of Adam moves everything by about its learning rate, 3e-4"
    assert recomputes == (settings.checkpointing == "full")
    assert dtype == ("torch.float32" if settings.engine == "torch" else "torch.bfloat16"), "fp32 are the masters"


def same_everywhere(configurations: list[Settings]) -> list[tuple[float, bool, str]]:
    """Runs on every rank."""
    return [run(settings) for settings in configurations]


@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
@pytest.mark.parametrize("settings", ONE, ids=lambda s: f"{s.engine}-{s.accumulation}")
def test_one_process(settings: Settings) -> None:
    check(settings, run(settings))


def test_two_ranks() -> None:
    first, second = on_ranks(2, same_everywhere, SEVERAL)
    for settings, mine, others in zip(SEVERAL, first, second, strict=True):
        check(settings, mine)
        assert mine == others


def test_fsdp2_names_the_model_and_the_precision_of_the_arithmetic() -> None:
    text = configuration(Settings("superoffload", "fsdp2", ranks=2))
    for part in (
        "model=model",
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16",
        "fully_shard(block, mp_policy=policy)",
    ):
        assert part in text


def test_replicas_share_the_state_as_the_memory_of_the_plan_has_it() -> None:
    assert 'replicated="shard"' in configuration(Settings("superoffload", "none", ranks=2))
    assert "replicated" not in configuration(Settings("superoffload", "fsdp2", ranks=2))


def test_placement_and_dtypes_of_state_are_arguments() -> None:
    """On a GPU; on the CPU there is nothing to place."""
    settings = Settings(gpu_fraction=0.125, state_dtype="bf16", master_dtype="split")
    given: dict[str, Any] = {}
    text = configuration(settings).replace("superoffload.AdamW", "remember").split("# one step")[0]

    def remember(params: Any, **options: Any) -> None:
        given.update(options)

    exec(text.replace("import superoffload", ""), {**names_for(settings), "remember": remember})
    assert check_placement(given["placement"]) == 0.125 and given["state_dtype"] == "bf16"
    assert given["master_dtype"] == "split"


@pytest.mark.parametrize("settings", [Settings(), Settings("superoffload", "fsdp2", ranks=2)])
def test_gradients_in_fp32_are_an_argument(settings: Settings) -> None:
    text = configuration(replace(settings, gradient_dtype="fp32"))
    asked = [line for line in text.splitlines() if line not in configuration(settings).splitlines()]
    assert asked == ['    accumulate_dtype="fp32",']


@pytest.mark.parametrize(
    ("settings", "wide"), [(Settings(), True), (Settings(ranks=2), False), (Settings(sharding="zero3", ranks=2), False)]
)
def test_the_report_names_the_gradients_that_there_are(settings: Settings, wide: bool) -> None:
    text = " ".join(assumptions(GH200_96, replace(settings, gradient_dtype="fp32")))
    assert ("fp32 gradients" if wide else "bf16 gradients") in text


def test_a_deepspeed_configuration_comes_with_what_the_script_needs() -> None:
    settings = Settings("superoffload", "zero3", ranks=2, checkpointing="full")
    (_, ours, activations) = configuration_notes(settings)
    assert "superoffload.integrations.deepspeed.enable()" in ours and "gradient_checkpointing_enable()" in activations
    assert len(configuration_notes(replace(settings, engine="torch", checkpointing="none"))) == 1
    assert configuration_notes(Settings()) == []

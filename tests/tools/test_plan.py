"""`superoffload plan`: memory by hand, settings that fit, what is printed, and its exit statuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from superoffload.tools.cli import main
from superoffload.tools.estimate import (
    ModelShape,
    Settings,
    activation_bytes,
    estimate_memory,
    estimate_step,
    pipeline,
    torch_on_gpu_bytes,
    typical_shape,
)
from superoffload.tools.machines import GIB, MACHINES, Machine
from superoffload.tools.plan import code_for, evaluate, first_that_fits, leaner

TOY = ModelShape(2, 64, 4, 2, 160, 256)
# Two layers of 2*64*(64+32) attention, 3*64*160 feed-forward and 2*64 norms, a last norm, two embeddings of 256*64.
TOY_PARAMETERS = 2 * (12288 + 30720 + 128) + 64 + 32768
SEVEN = typical_shape(7e9)
SHORT = Settings(sequence=32)


def run(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of the command."""
    status = main(["plan", *arguments, "--json", "plan.json"])
    report: dict[str, Any] = json.loads(Path("plan.json").read_text())
    return status, report


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- memory


def test_bytes_of_a_model_worked_out_by_hand() -> None:
    assert TOY.parameters == TOY_PARAMETERS == 119_104
    gpu, host = estimate_memory(TOY, SHORT)
    tokens_and_layers = 2 * 32 * (16 * 64 + 10 * 64 + 8 * 160) + 32 * 256 * 12
    assert activation_bytes(TOY, SHORT) == tokens_and_layers == 286_720
    # Its four buckets of gradients are more than its activations.
    assert [size / TOY_PARAMETERS for size in gpu.values()] == [2, 6, 8]
    assert [size / TOY_PARAMETERS for size in host.values()] == [4, 8, 2, 2, 2]
    assert torch_on_gpu_bytes(TOY, SHORT) == 18 * TOY_PARAMETERS + 286_720


@pytest.mark.parametrize(
    ("changed", "per_parameter"),
    [
        ({}, 18),
        ({"master_dtype": "split"}, 16),
        ({"state_dtype": "bf16"}, 14),
        ({"state_dtype": "8bit", "master_dtype": "split"}, 10 + 2 / 256),
        ({"gradient_dtype": "fp32"}, 20),
        ({"ranks": 4}, 18 / 4),
    ],
)
def test_host_bytes_per_parameter(changed: dict[str, Any], per_parameter: float) -> None:
    _, host = estimate_memory(SEVEN, Settings(**changed))
    assert sum(host.values()) / SEVEN.parameters == pytest.approx(per_parameter)


@pytest.mark.parametrize(
    ("settings", "per_parameter", "optimizer"),
    [
        (Settings(), 12, "CPUAdamW(model.parameters(), lr=1e-5)"),
        (Settings(state_dtype="bf16", accumulation=2), 8, 'CPUAdamW(model.parameters(), lr=1e-5, state_dtype="bf16")'),
        (Settings(state_dtype="8bit"), 6, "AdamW("),
        (Settings(master_dtype="split"), 12, "AdamW("),
    ],
)
def test_without_a_gpu_everything_is_in_host_memory(settings: Settings, per_parameter: int, optimizer: str) -> None:
    gpu, host = estimate_memory(SEVEN, settings, has_gpu=False)
    assert gpu == {}
    in_all = sum(host.values()) - activation_bytes(SEVEN, settings)
    assert in_all / SEVEN.parameters == pytest.approx(2 + 2 + per_parameter, rel=1e-3)
    text = "\n".join(code_for(settings, has_gpu=False))
    assert f"superoffload.{optimizer}" in text and ('speculation="never"' in text) == (optimizer == "AdamW(")
    names: dict[str, Any] = {"model": nn.Linear(8, 8)}
    exec(text, names)
    names["model"](torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    names["optimizer"].step()
    if optimizer == "AdamW(":
        assert names["optimizer"].stats()["journal_reserved_bytes"] == 0
        names["optimizer"].close()


# ---- time


def test_a_step_by_hand() -> None:
    """A pipeline of three stages, each as long as the window, ends one bucket's time per stage after it."""
    assert pipeline(64.0, [64.0, 64.0, 64.0]) == pytest.approx(64 + 3)
    assert estimate_step(SEVEN, Machine("unknown", host_memory=1e12), Settings()) == {}
    assert pipeline(0.0, [64.0, 128.0]) == pytest.approx(1 + 128)
    machine, half = Machine("even", 1e15, 1e12, 1e15, 1e12, 1e12, 1e12, 1e15, 1e12), replace(SHORT, utilization=0.5)
    parts = estimate_step(TOY, machine, half)
    flops = 32 * 6 * (TOY_PARAMETERS - 256 * 64 - 64 + 2 * 64 * 32)  # no input embedding, no last norm
    assert parts["forward"] == pytest.approx(flops / 3 / 0.5e12)
    assert parts["backward"] == pytest.approx(2 * parts["forward"])
    recomputed = estimate_step(TOY, machine, replace(half, checkpointing="full"))
    assert recomputed["backward"] == pytest.approx(3 * parts["forward"])
    busy = (2 + 29.2 + 2) * TOY_PARAMETERS / 1e12
    assert parts["optimizer, hidden"] + parts["optimizer, exposed"] == pytest.approx(busy, rel=1e-3)


# ---- what fits


def test_7b_on_a_4090_needs_checkpointing_and_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run("--model", "7B", "--hardware", "rtx-4090")
    assert (status, report["passed"], report["found"]) == (1, False, None)
    said = [line for line in capsys.readouterr().out.splitlines() if "--host-memory" in line]
    assert len(said) == 3 and all("activation checkpointing" in line for line in said)
    for line in said:  # what it names does
        assert run("--model", "7B", "--hardware", "rtx-4090", *line.split()[:2])[0] == 0
    status, report = run("--model", "7B", "--hardware", "rtx-4090", "--host-memory", "128")
    assert status == 0 and not report["asked"]["fits"]
    assert report["found"]["settings"]["checkpointing"] == "full"
    assert report["found"]["settings"]["state_dtype"] == "fp32"


def test_no_model_lists_the_largest_sizes_that_fit() -> None:
    status, report = run("--hardware", "rtx-4090")
    sizes = report["largest_billions"]
    assert status == 0 and sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert run("--hardware", "rtx-4090", "--model", f"{sizes[0]}B")[1]["asked"]["fits"]
    assert not run("--hardware", "rtx-4090", "--model", f"{1.1 * sizes[0]}B")[1]["asked"]["fits"]
    assert run("--hardware", "rtx-4090", "--host-memory", "0.01")[0] == 1


# ---- what is printed


class Blocks(nn.Module):
    """As in Hugging Face's models: `model.model.layers` are the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.gradient_checkpointing_enable = Mock()


def test_printed_code_runs() -> None:
    settings = Settings(checkpointing="full", state_dtype="8bit", master_dtype="split", accumulation=2)
    names: dict[str, Any] = {"model": Blocks()}
    exec("\n".join(code_for(settings)), names)
    model, optimizer = names["model"], names["optimizer"]
    nn.Sequential(*model.model.layers)(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert model.gradient_checkpointing_enable.called and all(one.dtype == torch.bfloat16 for one in model.parameters())
    assert optimizer.stats()["steps"] == 1 and optimizer.max_grad_norm == 1.0
    masters, moments = (optimizer.state[model.model.layers[0].weight][name] for name in ("master", "exp_avg"))
    assert (masters.dtype, moments.dtype) == (torch.float32, torch.bfloat16), "8-bit moments are shown in bf16"
    optimizer.close()


def test_printed_code_shards_with_fsdp2() -> None:
    text = "\n".join(code_for(Settings(ranks=2, gradient_dtype="fp32")))
    compile(text, "plan", "exec")
    assert text.index("fully_shard(module") < text.index("superoffload.AdamW("), "the optimizer takes the shards"
    assert (
        "model=model" in text and 'accumulate_dtype="fp32"' in text and "fully_shard" not in str(code_for(Settings()))
    )


CARD = replace(MACHINES["rtx-4090"], host_memory=400 * GIB)


def test_accumulation_that_only_host_memory_holds() -> None:
    asked = Settings(accumulation=8, checkpointing="full")
    assert not evaluate(SEVEN, CARD, asked)["fits"]
    found = first_that_fits(SEVEN, CARD, asked)
    assert found == replace(asked, gradient_dtype="fp32", sums_on_host=True)
    assert 'accumulate_dtype="fp32"' in "\n".join(code_for(found))
    assert all(not one.sums_on_host for one in leaner(replace(asked, ranks=2), has_gpu=True)), "FSDP2 adds on the GPU"


def test_adding_in_host_memory_takes_time() -> None:
    wide = Settings(accumulation=4, gradient_dtype="fp32")
    there, here = (estimate_step(SEVEN, CARD, replace(wide, sums_on_host=one)) for one in (False, True))
    waited = 3 * SEVEN.parameters * (4 / CARD.link_down + 12 / CARD.host_bandwidth)
    assert here["optimizer, exposed"] - there["optimizer, exposed"] == pytest.approx(waited)

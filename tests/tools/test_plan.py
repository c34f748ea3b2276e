"""`superoffload plan`: what it reads, memory by hand, settings that fit, what is printed, and its exit statuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from superoffload.errors import ArgumentError
from superoffload.host.system import System
from superoffload.tools.cli import main
from superoffload.tools.estimate import (
    ModelShape,
    Settings,
    activation_bytes,
    estimate_memory,
    estimate_step,
    find_model,
    pipeline,
    torch_on_gpu_bytes,
    typical_shape,
)
from superoffload.tools.machines import GIB, MACHINES, Machine, find_machine
from superoffload.tools.plan import code_for, evaluate, first_that_fits, in_bytes, leaner

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
    leanest = ("--checkpointing", "full", "--master-dtype", "split", "--state-dtype", "8bit")
    assert run("--hardware", "rtx-4090", *leanest)[1]["largest_billions"] == sizes[-1:]


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


# ---- what is read: models, machines and wrong arguments


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def read(folder: Path, values: Any) -> Any:
    (folder / "config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return find_model(str(folder))


@pytest.mark.parametrize("installed", [True, False])
def test_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """The numbers of parameters are those of the models' checkpoints."""
    if installed:
        pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    assert read(tmp_path, LLAMA).parameters == 8_030_261_248
    assert read(tmp_path, GPT2).parameters == pytest.approx(124e6, rel=0.01)
    mixtral = read(tmp_path, MIXTRAL)
    assert mixtral.parameters == pytest.approx(46.7e9, rel=0.001)
    assert mixtral.flops_per_token(0) / 6 == pytest.approx(12.9e9 - 32000 * 4096, rel=0.01), "two experts of eight"


def test_unusable_configs(tmp_path: Path) -> None:
    for values, message in (
        ("{", "not JSON"), ("[]", "JSON object"), ({**LLAMA, "hidden_size": "wide"}, "hidden_size='wide'"),
        ({"hidden_size": 64, "num_hidden_layers": 99999999}, "num_hidden_layers=99999999"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            read(tmp_path, values)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model seven", ["model='seven'", "7B", "config.json"]),
        ("--model nowhere.json", ["model=nowhere.json", "No such file"]),
        ("--model 7B --hardware rtx-1", ["hardware='rtx-1'", "rtx-4090"]),
        ("--model 7B --hardware H100", ["hardware='H100'", "did you mean h100-card or h100-pcie5?"]),
        ("--model 7B --ranks 0", ["ranks=0"]),
        ("--model 7B --utilization 2", ["utilization=2.0"]),
        ("--model 7B --host-memory 128XB", ["host_memory='128XB'", "128GB"]),
        ("--model 7B --host-bandwidth 5GiB", ["host_bandwidth='5GiB'", "GB/s"]),
        ("7B", ["did you mean --model 7B?"]),
        ("--json no/where.json", ["json=no/where.json"]),
    ],
)
def test_wrong_arguments(arguments: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_sizes_with_and_without_a_unit() -> None:
    for name, text, size in (
        ("host_memory", "2GB", 2e9), ("gpu_memory", "2 gib", 2 * GIB), ("host_bandwidth", ".5GB/s", 5e8)
    ):  # fmt: skip
        assert in_bytes(name, text) == size


@pytest.mark.parametrize(
    ("device", "known"),
    [("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None)],
)
def test_this_machine(device: str, known: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {200 << 20} kB\nMemAvailable: {100 << 20} kB\n")
    system = System(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", bool)
    assert find_machine(None, 1, system).host_memory == 100 * GIB and find_machine(None, 1, system).gpu_memory == 0
    properties = SimpleNamespace(name=device, total_memory=20 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    machine = find_machine(None, 2, system)
    assert (machine.gpu_memory, machine.host_memory) == (20 * GIB, 50 * GIB)
    assert machine.flops == (MACHINES[known].flops if known else 0)


def test_fields_that_a_config_leaves_to_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    assert read(tmp_path, {"model_type": "gemma2"}).parameters == pytest.approx(2_614_341_888, rel=1e-4)
    assert read(tmp_path, GEMMA3).parameters == pytest.approx(3.88e9, rel=0.01), "without its vision tower"
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match=r"num_attention_heads is missing.*install transformers"):
        read(tmp_path, GEMMA3)

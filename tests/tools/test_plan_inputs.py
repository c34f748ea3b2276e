"""What `superoffload plan` reads: models, machines and wrong arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from superoffload.errors import ArgumentError
from superoffload.host.system import System
from superoffload.tools.cli import main
from superoffload.tools.estimate import find_model
from superoffload.tools.machines import GIB, MACHINES, find_machine
from superoffload.tools.plan import in_bytes

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"hidden_size": 64, "num_hidden_layers": 99999999}', "num_hidden_layers=99999999"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "hidden_size='wide'"),
    ],
)
def test_unusable_configs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--model seven", ["model='seven'", "7B", "config.json"]),
        ("--model nowhere.json", ["model=nowhere.json", "No such file"]),
        ("--model 7B --hardware rtx-1", ["hardware='rtx-1'", "rtx-4090"]),
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


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("host_memory", "2GB", 2e9),
        ("gpu_memory", "2 gib", 2 * GIB),
        ("host_bandwidth", ".5GB/s", 5e8),
    ],
)
def test_sizes_with_and_without_a_unit(name: str, text: str, size: float) -> None:
    assert in_bytes(name, text) == size


@pytest.mark.parametrize(
    ("device", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-pcie5"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
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


GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
}


def test_fields_that_a_config_leaves_to_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    assert read(tmp_path, {"model_type": "gemma2"}).parameters == pytest.approx(2_614_341_888, rel=1e-4)
    assert read(tmp_path, GEMMA3).parameters == pytest.approx(3.88e9, rel=0.01), "without its vision tower"
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match=r"num_attention_heads is missing.*install transformers"):
        read(tmp_path, GEMMA3)

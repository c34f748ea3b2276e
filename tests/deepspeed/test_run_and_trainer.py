"""`superoffload run`, and the example: Hugging Face Trainer on two ranks, checkpoint, best model, resume."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compatibility import compat

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
}
RUN = [sys.executable, "-m", "superoffload", "run", "--"]


def run(*command: str, timeout: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env={**ENVIRONMENT, **more}
    )


def test_deepspeed_is_enabled_and_other_sitecustomize_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    code = (
        "import sys; assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules\n"
        "import deepspeed.runtime.config, superoffload.integrations.deepspeed as s\n"
        "print(s.is_enabled(), deepspeed.__spec__.name)"
    )
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])
    found = run(*RUN, sys.executable, "-c", code, PYTHONPATH=path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["mine", "mine", "True", "deepspeed"]  # superoffload itself is a Python too


def test_the_exit_status_is_that_of_the_command() -> None:
    assert run(*RUN, sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(("command", "words"), [([], "no command"), (["no-such-program"], "not found")])
def test_bad_commands(command: list[str], words: str) -> None:
    found = run(*RUN, *command)
    assert found.returncode == 2
    assert words in found.stderr


needs_trainer = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="needs transformers and accelerate, which are not installed",
)


def train(out: Path, text: Path, steps: int, *more: str, config: dict[str, object] | None = None) -> list[float]:
    """The losses that the Trainer logged."""
    if config is not None:
        path = out.with_suffix(".json")
        path.write_text(json.dumps(config))
        more = (*more, "--deepspeed", str(path))
    found = run(
        *RUN, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "examples/deepspeed/train.py",
        "--text", str(text), "--out", str(out), "--steps", str(steps), "--hidden", "32", "--layers", "2", *more,
        timeout=200,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-6000:]
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@compat("Hugging Face Trainer, and its resume", "deepspeed")
@compat("Accelerate: prepare, accumulate, clip_grad_norm_", "deepspeed", note="below Trainer")
@needs_trainer
def test_trainer_and_its_resume(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"It was the best of times, it was the worst of times. " * 400)
    straight = train(tmp_path / "straight", text, 8, "--save-steps", "4")
    assert straight[-1] < 0.95 * straight[0]
    # the same run, interrupted after step 4
    checkpoints = sorted((tmp_path / "straight").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-4", "checkpoint-8"]
    (tmp_path / "resumed").mkdir()
    checkpoints[0].rename(tmp_path / "resumed" / "checkpoint-4")
    resumed = train(tmp_path / "resumed", text, 8, "--save-steps", "4", "--resume")
    assert resumed == straight

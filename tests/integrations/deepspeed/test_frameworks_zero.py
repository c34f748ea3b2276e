"""`superoffload run` and launchers; Trainer with its resume, TRL, and Lightning, which refuses, under ZeRO-3."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.checkout import ROOT
from tests.support.deepspeed.ranks import QUICK_KERNELS, Ranks
from tests.support.deepspeed.training import config, end
from tests.support.optional_packages import needs

ENVIRONMENT = {
    **os.environ,
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "LOCAL_SIZE": "1",  # of devices, as without it; DeepSpeed would run numactl to count them in every reduction
    "PYTHONPATH": os.pathsep.join([str(ROOT), QUICK_KERNELS, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
}
RUN = [sys.executable, "-m", "superoffload", "run", "--"]
TAKE_OVER = [*RUN[:-1], "--take-over", "--"]


def run(*command: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
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
    code = (
        "import deepspeed; from superoffload.integrations.deepspeed import config, switch\n"
        "print(config.selects_us({'zero_optimization': {'offload_optimizer': {'device': 'cpu'}}},"
        " take_over=switch._take_over))"
    )
    asked = [run(*command, sys.executable, "-c", code).stdout.split()[-1] for command in (RUN, TAKE_OVER)]
    assert asked == ["False", "True"]


def test_the_exit_status_is_that_of_the_command_and_bad_commands_are_told() -> None:
    assert run(*RUN, sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    for command, words in ([], "no command"), (["no-such-program"], "not found"):
        found = run(*RUN, *command)
        assert found.returncode == 2
        assert words in found.stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_accelerators", "1"],
    "accelerate": ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no",
                   "--dynamo_backend", "no", "--cpu"],
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher: str, tmp_path: Path) -> None:
    """What ``torchrun`` starts is trained with below."""
    if importlib.util.find_spec(launcher) is None:
        pytest.skip(f"needs {launcher}: pip install {launcher}")
    script = tmp_path / "train.py"
    script.write_text(
        "import deepspeed\nfrom superoffload.integrations.deepspeed import is_enabled\nprint('enabled:', is_enabled())"
    )
    port = ["--master_port", free_port()] if launcher == "deepspeed" else []
    found = run(*RUN, *LAUNCHERS[launcher], *port, str(script), timeout=100)
    assert found.returncode == 0, found.stderr
    assert "enabled: True" in found.stdout


EXAMPLE = ROOT / "examples" / "deepspeed"


def untouched(folder: Path) -> Path:
    """The example without superoffload's two lines."""
    lines = (EXAMPLE / "train.py").read_text().splitlines()
    kept = [line for line in lines if "superoffload.integrations" not in line]
    assert len(lines) - len(kept) == 2
    script = folder / "train.py"
    script.write_text("\n".join(kept))
    (folder / "ds.json").write_text((EXAMPLE / "ds.json").read_text())
    return script


def train(script: Path, out: Path, text: Path, steps: int, *more: str, by: Sequence[str] = RUN) -> list[float]:
    """The losses that the Trainer logged."""
    found = run(
        *by, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script),
        "--text", str(text), "--out", str(out), "--steps", str(steps), "--hidden", "32", "--layers", "2", *more,
        timeout=200,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-6000:]
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@needs("transformers", "accelerate")
@pytest.mark.in_turn
def test_trainer_and_its_resume(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"It was the best of times, it was the worst of times. " * 400)
    straight = train(untouched(tmp_path), tmp_path / "straight", text, 8, "--save-steps", "4")
    assert straight[-1] < 0.95 * straight[0]
    # the same run, interrupted after step 4
    checkpoints = sorted((tmp_path / "straight").glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-4", "checkpoint-8"]
    (tmp_path / "resumed").mkdir()
    checkpoints[0].rename(tmp_path / "resumed" / "checkpoint-4")
    resumed = train(EXAMPLE / "train.py", tmp_path / "resumed", text, 8, "--save-steps", "4", "--resume")
    assert resumed == straight


# What guides for ZeRO-2 with CPU offload tell people to write.
RECIPE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e5,
        "contiguous_gradients": True,
    },
    **dict.fromkeys(
        ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
        "auto",
    ),
}


@needs("transformers", "accelerate")
@pytest.mark.in_turn
def test_trainer_with_a_recipe_for_zero_2(tmp_path: Path) -> None:
    """The loss curve of stock, by the device and by ``--take-over``, which leaves the recipe as it is."""
    text, script = tmp_path / "text.txt", untouched(tmp_path)
    text.write_bytes(b"It was the best of times, it was the worst of times. " * 400)
    ours = {**RECIPE["zero_optimization"], "offload_optimizer": {"device": "superoffload"}}
    files = {"stock": RECIPE, "ours": {**RECIPE, "zero_optimization": ours}}
    for name, recipe in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(recipe))
    losses = {}
    for way, name, by in (("stock", "stock", []), ("taken over", "stock", TAKE_OVER), ("ours", "ours", RUN)):
        out = tmp_path / way
        losses[way] = train(
            script, out, text, 8, "--save-steps", "8", "--deepspeed", str(tmp_path / f"{name}.json"), by=by
        )
        states = [torch.load(path, weights_only=False) for path in out.rglob("*optim_states.pt")]
        kinds = {str(state["optimizer_state_dict"]["zero_stage"]) for state in states}
        assert kinds == {"ZeroStageEnum.gradients"}
    assert losses["ours"] == losses["taken over"] == pytest.approx(losses["stock"], rel=2e-3)
    assert losses["ours"][-1] < 0.95 * losses["ours"][0]


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
    from lightning.pytorch.demos.boring_classes import BoringModel

    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    with mock.patch.dict(os.environ):  # Lightning says there which rank this is; later tests must not think so
        trainer = lightning.Trainer(strategy="deepspeed_stage_3", accelerator="cpu", **options)
        with pytest.raises(Exception, match="The DeepSpeed strategy is only supported on CUDA GPUs"):
            trainer.fit(BoringModel())


def trained_by_trl(kind: str, folder: str, options: dict[str, Any]) -> tuple[Any, list[float]]:
    """``kind``: "SFT", or a trainer that generates."""
    from accelerate.state import AcceleratorState

    import superoffload.integrations.deepspeed as ours
    from tests.support.hugging_face import generating, logs_of, model_of, sft

    ours.enable()
    AcceleratorState._reset_state(reset_partial_state=True)
    make, clip, accumulation = (sft, 1.0, 1) if kind == "SFT" else (partial(generating, kind), 0.5, 2)
    trainer = make(
        folder,
        model_of,
        per_device_train_batch_size=2,
        weight_decay=0.1,
        max_grad_norm=clip,
        deepspeed=config(precision="fp32", clip=clip, accumulation=accumulation, options=options),
    )
    trainer.train()
    engine = trainer.model_wrapped
    found = (engine.optimizer.state_digests(), [entry["loss"] for entry in logs_of(trainer)])
    end(engine)
    AcceleratorState._reset_state(reset_partial_state=True)
    return found


@needs("trl", "datasets")
@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_trl(kind: str, two_ranks: Ranks, tmp_path: Path) -> None:
    always, never = (
        two_ranks.run(trained_by_trl, kind, str(tmp_path), {"speculation": mode}) for mode in ("always", "never")
    )
    assert always == never
    for _, losses in always:
        assert len(set(losses)) > 1
        assert kind != "SFT" or losses[-1] < losses[0]

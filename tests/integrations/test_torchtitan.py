"""torchtitan's own Trainer on meshes of 2 and 4 ranks, with ``superoffload.AdamW`` by its configuration alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.optional_packages import needs
from tests.support.turns import in_turn

pytestmark = needs("torchtitan")

OFFLOAD = "superoffload.integrations.torchtitan.offload"
METRICS = "superoffload.integrations.torchtitan.metrics"
STEPS = 4
BASIC = ["--debug.seed", "1", "--training.steps", str(STEPS)]
PARALLEL = "--parallelism."
# layout: ranks, model, degrees
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fsdp2": (2, "llama", {}),
    "tp2": (2, "llama", {"tensor_parallel_degree": 2}),
    "pp2": (2, "llama", {"pipeline_parallel_degree": 2}),
    "pp2_interleaved": (
        2,
        "llama",
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "ep2": (2, "deepseek", {"expert_parallel_degree": 2}),
    "hsdp2x2": (4, "llama", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    "fsdp2xtp2": (4, "llama", {"tensor_parallel_degree": 2}),
    "ep2xtp2": (4, "deepseek", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pp2xfsdp2": (4, "llama", {"pipeline_parallel_degree": 2}),
}

Seen = dict[str, dict[str, Any]]


def arguments(layout: str, *more: str) -> list[str]:
    _, model, degrees = LAYOUTS[layout]
    chosen = [text for name, value in degrees.items() for text in (PARALLEL + name, str(value))]
    return ["--config", model, *BASIC, *chosen, *more]


def offload(*others: str, **options: Any) -> list[str]:
    return ["--override.imports", f"{OFFLOAD}={json.dumps(options)}", *others]


def train(folder: Path, ranks: int, cases: dict[str, list[str]]) -> list[Seen]:
    """Runs the cases one after another on ``ranks`` processes; returns what each rank saw."""
    listed = [{"name": name, "arguments": [*given, "--dump_folder", str(folder)]} for name, given in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.support.titan_program", str(folder), str(folder / "cases.json")]
    done = subprocess.run([*launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("layout", in_turn(LAYOUTS, every_time=["fsdp2", "fsdp2xtp2"]))
def test_same_bits_with_and_without_speculation_and_torchtitans_curve(layout: str, tmp_path: Path) -> None:
    cases = {
        "stock": arguments(layout),
        "never": arguments(layout, *offload(METRICS, speculation="never")),
        "always": arguments(layout, *offload(METRICS, speculation="always")),
    }
    for seen in train(tmp_path, LAYOUTS[layout][0], cases):
        stock, never, always = seen["stock"], seen["never"], seen["always"]
        assert len(never["losses"]) == STEPS
        for key in ("losses", "norms", "digests"):
            assert always[key] == never[key], key
        assert always["stats"]["buckets_speculated"] > 0 == never["stats"]["buckets_speculated"]
        assert always["stats"]["clipped_steps"] == STEPS, "training.max_norm is 1, and these norms are above it"
        # torch computes the same updates in another order of roundings, and bf16 layers amplify that from step to step
        assert never["losses"][:2] == pytest.approx(stock["losses"][:2], rel=1e-4)
        assert never["losses"] == pytest.approx(stock["losses"], rel=1e-3)
        assert never["norms"] == pytest.approx(stock["norms"], rel=3e-3)
        assert never["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert never["digests"].keys() == stock["digests"].keys(), "a checkpoint has torchtitan's own entries"
        assert not any(stock["metrics"])
        assert always["metrics"][0]["superoffload/step_down_bytes_per_second"] > 0, "of the first step too"
        assert always["metrics"][-1]["superoffload/clip_rate"] == 1


@pytest.mark.in_turn
def test_checkpoints_resume_to_the_bit_and_change_places_with_torchtitans(tmp_path: Path) -> None:
    def saving(folder: str, *more: str) -> list[str]:
        return ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.folder", folder, *more]

    resumed = ["--checkpoint.load_step", "2"]
    cases = {
        "stock": arguments("fsdp2", *saving("stock")),
        "ours": arguments("fsdp2", *saving("ours"), *offload()),
        "ours resumed": arguments("fsdp2", *saving("ours", *resumed), *offload()),
        "ours from stock": arguments("fsdp2", *saving("stock", *resumed), *offload()),
        "stock from ours": arguments("fsdp2", *saving("ours", *resumed)),
        "on demand": arguments("fsdp2", *saving("demand"), *offload(delivery="on_demand")),
    }
    for seen in train(tmp_path, 2, cases):
        assert seen["ours resumed"]["digests"] == seen["ours"]["digests"] == seen["on demand"]["digests"]
        assert "state_dict: nothing under 'state." in seen["ours resumed"]["refusal"]
        assert seen["ours resumed"]["losses"] == seen["ours"]["losses"][2:]
        for other in ("ours from stock", "stock from ours"):
            assert seen[other]["losses"] == pytest.approx(seen["stock"]["losses"][2:], rel=1e-3)
            assert seen[other]["squares"] == pytest.approx(seen["stock"]["squares"], rel=1e-3)


@pytest.mark.in_turn
def test_another_mesh_loads_a_checkpoint_whole(tmp_path: Path) -> None:
    saved = ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.folder", "saved"]
    loaded = [*saved, "--checkpoint.load_step", str(STEPS), "--checkpoint.exclude_from_loading", "dataloader"]
    cases = {
        "fsdp2": arguments("fsdp2", *saved, *offload(delivery="on_demand")),
        "tp2": arguments("tp2", *loaded, *offload()),
        "pp2": arguments("pp2_interleaved", *loaded, *offload()),
    }
    ranks = train(tmp_path, 2, cases)
    for seen in ranks:
        assert seen["tp2"]["digests"] == seen["fsdp2"]["digests"]
    stages = [seen["pp2"]["digests"] for seen in ranks]
    assert {**stages[0], **stages[1]} == ranks[0]["fsdp2"]["digests"]
    assert not stages[0].keys() & stages[1].keys()


@pytest.mark.in_turn
def test_accumulated_gradients_and_options(tmp_path: Path) -> None:
    twice = ["--training.global_batch_size", "16"]  # 2 ranks, 4 each, 2 times
    cases = {
        "stock": arguments("fsdp2", *twice),
        "never": arguments("fsdp2", *twice, *offload(speculation="never")),
        "always": arguments("fsdp2", *twice, *offload(speculation="always")),
        "own norm": arguments("fsdp2", *twice, "--training.max_norm", "inf", *offload(max_grad_norm=1.0)),
        "no clipping": arguments("fsdp2", "--training.max_norm", "inf", *offload()),
        "rarely logged": arguments("fsdp2", "--metrics.log_freq", "4", *offload(METRICS)),
        "bf16 state": arguments("fsdp2", "--optimizer.implementation", "fused_opt_states_bf16", *offload()),
    }
    for seen in train(tmp_path, 2, cases):
        assert seen["always"]["digests"] == seen["never"]["digests"] == seen["own norm"]["digests"]
        assert seen["never"]["losses"] == pytest.approx(seen["stock"]["losses"], rel=1e-3)
        stats = seen["always"]["stats"]
        assert stats["buckets_committed"] + stats["buckets_replayed"] > 0
        undone = stats["buckets_undone"] - stats["journal_overflows"]
        assert undone == 0, "a backward that was not the last was taken for it"
        assert seen["no clipping"]["stats"]["clipped_steps"] == 0
        assert seen["no clipping"]["norms"][0] > 1
        assert len(seen["rarely logged"]["metrics"]) == 2 < seen["rarely logged"]["steps watched"] == STEPS
        assert seen["bf16 state"]["stats"]["host_bytes"] < seen["no clipping"]["stats"]["host_bytes"]


@pytest.mark.in_turn
def test_errors_name_the_setting(tmp_path: Path) -> None:
    cases = {
        "two norms": arguments("fsdp2", *offload(max_grad_norm=0.5)),
        "taken": arguments("fsdp2", *offload(model="m")),
        "parts": arguments("pp2_interleaved", *offload(delivery="on_demand")),
        "kind": arguments("fsdp2", "--optimizer.param_groups.0.optimizer_name", "DistMuon", *offload()),
        "rate": arguments("fsdp2", *offload(lr=0.01)),
        "two dtypes": arguments(
            "fsdp2", "--optimizer.implementation", "fused_opt_states_bf16", *offload(state_dtype="fp32")
        ),
        "zero": arguments("fsdp2", "--training.max_norm", "0", *offload()),
        "no optimizer": arguments("fsdp2", "--override.imports", METRICS),
        "unknown": arguments("fsdp2", *offload(specualtion="never")),
    }
    for seen in train(tmp_path, 2, cases):
        assert "training.max_norm: 1.0, but max_grad_norm of the optimizer is 0.5" in seen["two norms"]["error"]
        assert "delivery='on_demand' with 2 parts of the model" in seen["parts"]["error"]
        assert "optimizer_name='DistMuon' for the pattern '.*'; expected AdamW" in seen["kind"]["error"]
        assert "options: lr=0.01, which torchtitan's groups decide" in seen["rate"]["error"]
        assert "state_dtype='fp32', but optimizer.implementation is 'fused_opt" in seen["two dtypes"]["error"]
        assert "training.max_norm: 0.0, expected a number above 0, or inf" in seen["zero"]["error"]
        assert f"add {OFFLOAD} to override.imports" in seen["no optimizer"]["error"]
        assert "options: model='m'" in seen["taken"]["error"]
        assert "specualtion" in seen["unknown"]["error"] and "speculation" in seen["unknown"]["error"]

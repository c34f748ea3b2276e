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

pytestmark = [needs("torchtitan"), pytest.mark.timeout(1500)]  # all cases of two ranks in one launch

OFFLOAD = "superoffload.integrations.torchtitan.offload"
METRICS = "superoffload.integrations.torchtitan.metrics"
STEPS = 4
FP32 = ["--training.mixed_precision_param", "float32"]  # bf16 takes ten times as long where processors lack it
BF16 = ["--training.mixed_precision_param", "bfloat16"]
PARALLEL = "--parallelism."
# layout: model, degrees
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("llama", {}),  # in every run; the others in turn
    "pp2_interleaved": ("llama", {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}),
    "ep2": ("deepseek", {"expert_parallel_degree": 2}),
}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("llama", {"tensor_parallel_degree": 2}),
    "pp2": ("llama", {"pipeline_parallel_degree": 2}),
}
FOUR_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "hsdp2x2": ("llama", {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    "fsdp2xtp2": ("llama", {"tensor_parallel_degree": 2}),
    "ep2xtp2": ("deepseek", {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}),
    "pp2xfsdp2": ("llama", {"pipeline_parallel_degree": 2}),
}

Seen = dict[str, dict[str, Any]]


def arguments(layout: str, *more: str) -> list[str]:
    model, degrees = {**LAYOUTS, **TWO_RANKS, **FOUR_RANKS}[layout]
    chosen = [text for name, value in degrees.items() for text in (PARALLEL + name, str(value))]
    precision = [] if BF16[0] in more else FP32
    return ["--config", model, "--debug.seed", "1", "--training.steps", str(STEPS), *precision, *chosen, *more]


def fsdp2(*more: str) -> list[str]:
    return arguments("fsdp2", *more)


def offload(*others: str, **options: Any) -> list[str]:
    return ["--override.imports", f"{OFFLOAD}={json.dumps(options)}", *others]


def saving(folder: str, *more: str) -> list[str]:
    return ["--checkpoint.enable", "--checkpoint.interval", "2", "--checkpoint.folder", folder, *more]


def three_ways(layout: str) -> dict[str, list[str]]:
    return {
        f"{layout} stock": arguments(layout),
        f"{layout} never": arguments(layout, *offload(METRICS, speculation="never")),
        f"{layout} always": arguments(layout, *offload(METRICS, speculation="always")),
    }


RESUMED = ["--checkpoint.load_step", "2"]
WHOLE = ["--checkpoint.load_step", str(STEPS), "--checkpoint.exclude_from_loading", "dataloader"]
TWICE = ["--training.global_batch_size", "16"]  # 2 ranks, 4 each, 2 times
BF16_STATE = ["--optimizer.implementation", "fused_opt_states_bf16"]
UNCLIPPED = ["--training.max_norm", "inf"]
OTHER_OPTIONS = [*UNCLIPPED, *BF16_STATE, *BF16, "--metrics.log_freq", "4"]
CORE = {
    "fsdp2 stock": fsdp2(*saving("stock")),
    "fsdp2 never": fsdp2(*offload(METRICS, speculation="never")),
    "fsdp2 always": fsdp2(*saving("ours"), *offload(METRICS, speculation="always")),
    "ours resumed": fsdp2(*saving("ours", *RESUMED), *offload()),
}
OTHERS = {name: given for layout in list(LAYOUTS)[1:] for name, given in three_ways(layout).items()} | {
    "ours from stock": fsdp2(*saving("stock", *RESUMED), *offload()),
    "stock from ours": fsdp2(*saving("ours", *RESUMED)),
    "on demand": fsdp2(*saving("demand"), *offload(delivery="on_demand")),
    "tp2 from on demand": arguments("tp2", *saving("demand", *WHOLE), *offload()),
    "pp2 from on demand": arguments("pp2_interleaved", *saving("demand", *WHOLE), *offload()),
    "twice stock": fsdp2(*TWICE),
    "twice never": fsdp2(*TWICE, *offload(speculation="never")),
    "twice always, own norm": fsdp2(*TWICE, *UNCLIPPED, *offload(speculation="always", max_grad_norm=1.0)),
    "other options": fsdp2(*OTHER_OPTIONS, *offload(METRICS)),
}
ERRORS = {
    "training.max_norm: 1.0, but max_grad_norm of the optimizer is 0.5": fsdp2(*offload(max_grad_norm=0.5)),
    "options: model='m'": fsdp2(*offload(model="m")),
    "delivery='on_demand' with 2 parts of the model": arguments("pp2_interleaved", *offload(delivery="on_demand")),
    "optimizer_name='DistMuon' for the pattern '.*'; expected AdamW": fsdp2(
        "--optimizer.param_groups.0.optimizer_name", "DistMuon", *offload()
    ),
    "options: lr=0.01, which torchtitan's groups decide": fsdp2(*offload(lr=0.01)),
    "state_dtype='fp32', but optimizer.implementation is 'fused_opt": fsdp2(*BF16_STATE, *offload(state_dtype="fp32")),
    "training.max_norm: 0.0, expected a number above 0, or inf": fsdp2("--training.max_norm", "0", *offload()),
    f"add {OFFLOAD} to override.imports": fsdp2("--override.imports", METRICS),
    "specualtion": fsdp2(*offload(specualtion="never")),
}


def train(folder: Path, ranks: int, cases: dict[str, list[str]]) -> list[Seen]:
    """Runs the cases one after another on ``ranks`` processes; returns what each rank saw."""
    listed = [{"name": name, "arguments": [*given, "--dump_folder", str(folder)]} for name, given in cases.items()]
    (folder / "cases.json").write_text(json.dumps(listed))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.integrations.titan_program", str(folder), str(folder / "cases.json")]
    done = subprocess.run([*launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Seen]:
    return train(folder, 2, CORE | ERRORS)


@pytest.fixture(scope="module")
def all_of_two(folder: Path, two: list[Seen]) -> list[Seen]:
    return [core | others for core, others in zip(two, train(folder, 2, OTHERS), strict=True)]


def check_layout(seen: Seen, layout: str) -> None:
    stock, never, always = (seen[f"{layout} {way}"] for way in ("stock", "never", "always"))
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


def test_same_bits_with_and_without_speculation_and_torchtitans_curve(two: list[Seen]) -> None:
    """And a run that resumes has the bits of one that was not interrupted."""
    for seen in two:
        check_layout(seen, "fsdp2")
        ours, resumed = seen["fsdp2 always"], seen["ours resumed"]
        assert resumed["digests"] == ours["digests"]
        assert resumed["losses"] == ours["losses"][2:]
        assert "state_dict: nothing under 'state." in resumed["refusal"]


IN_TURN = pytest.mark.in_turn("torchtitan's layouts")


@IN_TURN
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layouts_of_two_ranks(layout: str, all_of_two: list[Seen]) -> None:
    for seen in all_of_two:
        check_layout(seen, layout)


@pytest.mark.in_turn
@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["two ranks", "four ranks"])
def test_other_layouts(ranks: int, layouts: dict[str, Any], tmp_path: Path) -> None:
    cases = {name: given for layout in layouts for name, given in three_ways(layout).items()}
    for seen in train(tmp_path, ranks, cases):
        for layout in layouts:
            check_layout(seen, layout)


@IN_TURN
def test_checkpoints_change_places_with_torchtitans_and_other_meshes_load_them(all_of_two: list[Seen]) -> None:
    expected = all_of_two[0]["on demand"]["digests"]
    for seen in all_of_two:
        stock = seen["fsdp2 stock"]
        assert seen["fsdp2 always"]["digests"] == seen["on demand"]["digests"]
        for other in ("ours from stock", "stock from ours"):
            assert seen[other]["losses"] == pytest.approx(stock["losses"][2:], rel=1e-3)
            assert seen[other]["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert seen["tp2 from on demand"]["digests"] == seen["on demand"]["digests"] == expected
    stages = [seen["pp2 from on demand"]["digests"] for seen in all_of_two]
    assert {**stages[0], **stages[1]} == expected
    assert not stages[0].keys() & stages[1].keys()


@IN_TURN
def test_accumulated_gradients_and_options(all_of_two: list[Seen]) -> None:
    for seen in all_of_two:
        stock, never, always = (seen[f"twice {way}"] for way in ("stock", "never", "always, own norm"))
        assert always["digests"] == never["digests"]
        assert never["losses"] == pytest.approx(stock["losses"], rel=1e-3)
        stats = always["stats"]
        assert stats["buckets_committed"] + stats["buckets_replayed"] > 0
        undone = stats["buckets_undone"] - stats["journal_overflows"]
        assert undone == 0, "a backward that was not the last was taken for it"
        others = seen["other options"]
        assert others["stats"]["clipped_steps"] == 0 and others["norms"][0] > 1
        assert len(others["metrics"]) == 2 < others["steps watched"] == STEPS
        assert others["stats"]["host_bytes"] < seen["fsdp2 always"]["stats"]["host_bytes"]


def test_errors_name_the_setting(two: list[Seen]) -> None:
    for seen in two:
        for words in ERRORS:
            assert words in seen[words]["error"]

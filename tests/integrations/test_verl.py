"""verl's own TrainingWorker and FSDP2 engine on 1 and 2 ranks, with ``superoffload.AdamW`` by its configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import ROOT
from tests.support.optional_packages import needs

pytestmark = [
    needs("verl", "ray", "tensordict", "transformers", "peft"),
    pytest.mark.in_turn("verl"),
    pytest.mark.timeout(1500),  # all cases of two ranks in one launch
]

OURS, VERLS = "superoffload.integrations.verl", "verl.workers.engine.fsdp.transformer_impl"
CLIP = {1: 1.5, 2: 1.083}  # by the number of ranks: clips some of the steps
BF16 = {"model_dtype": "bf16"}
STATE_AWAY = {**BF16, "optimizer_offload": True}
PARAMS_AWAY = {**BF16, "param_offload": True}
EACH = {"use_no_sync_for_gradient_accumulation": False}  # verl's default: each micro-batch is reduced
# Two of these steps are not finite.
TRAIN = ("train 2", "poison nan", "poison inf", "train 2")
FINITE = (0, 1, 4, 5)
SCALED = ("scale", "train 2", "poison inf", "train 1")
Seen = dict[str, dict[str, Any]]


def case(name: str, *actions: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "actions": actions, **more}


def offload(clip_grad: float = CLIP[2], **options: Any) -> dict[str, Any]:
    given = {"speculation": "always", "bucket_numel": 8192, **options}
    return {"optimizer_impl": "superoffload", "clip_grad": clip_grad, "override_optimizer_config": given}


def on_any_ranks(clip: float) -> list[dict[str, Any]]:
    stock, never = {"clip_grad": clip}, offload(clip, speculation="never")
    return [
        case("stock", *TRAIN, engines="verl", optim=stock),
        case("never", *TRAIN, optim=never),
        case("always", *TRAIN, optim=offload(clip)),
        case("always, verl clips", *TRAIN, engines="verl", optim=offload(clip)),
    ]


def away(name: str, *actions: str, engine: dict[str, Any], **options: Any) -> dict[str, Any]:
    """verl offloads as from a GPU."""
    return case(name, *actions, optim=offload(**options), engine=engine, away=True)


STOCK = {"clip_grad": CLIP[2]}
ON_TWO_RANKS = [
    case("stock in our engine", *TRAIN, optim=STOCK),
    case("never, verl clips", *TRAIN, engines="verl", optim=offload(speculation="never")),
    case("never, each", "train 4", optim=offload(speculation="never"), engine=EACH),
    case("always, each", "train 4", optim=offload(), engine=EACH),
    case("scaled", *SCALED, optim=offload()),
    case("stock, scaled", *SCALED, engines="verl", optim=STOCK),
    case("bf16", "train 2", "save a-2", "train 2", "weigh", optim=offload(), engine=BF16),
    case("bf16 resumed", "load a-2", "train 2", optim=offload(), engine=BF16),
    away(
        "moved",
        *("train 1", "move cpu optimizer", "move cuda optimizer", "train 1", "move cpu model", "move cuda model"),
        *("train 2", "weigh"),
        engine=BF16,
    ),
    away("state away", "weigh", "train 2", "weigh", "save b-2", "train 2", engine=STATE_AWAY),
    away("state away resumed", "move cpu optimizer", "load b-2", "weigh", "train 2", engine=STATE_AWAY),
    away("parameters away", "train 2", "weigh", "save c-2", "train 2", engine=PARAMS_AWAY),
    away("parameters away resumed", "move cpu model", "load c-2", "weigh", "train 2", engine=PARAMS_AWAY),
    away("on demand", "train 2", "infer", "train 2", engine={**STATE_AWAY, **PARAMS_AWAY}, delivery="on_demand"),
    case("fp32 sums", "train 2", optim=offload(accumulate_dtype="fp32"), engine={**BF16, "mixed_precision": None}),
    case("stock adapter", "train 2", engines="verl", model={"lora_rank": 4}),
    case("adapter", "train 2", optim=offload(), model={"lora_rank": 4}),
    case("stock critic", "train 2", type="value_model", engines="verl"),
    case("critic", "train 2", type="value_model", optim=offload(1.0)),
    away("failed", "train 1", "fail", engine=STATE_AWAY),
    case("taken", optim=offload(max_grad_norm=0.5)),
    case("zero", optim=offload(0.0)),
    case("unknown", optim=offload(specualtion="never")),
]


def seen_by(folder: Path, ranks: int, cases: list[dict[str, Any]]) -> list[Seen]:
    """Runs the cases one after another on ``ranks`` processes; returns what each rank saw."""
    (folder / "cases.json").write_text(json.dumps(cases))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.integrations.verl_program", str(folder), str(folder / "cases.json")]
    done = subprocess.run([*launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return seen_by(tmp_path_factory.mktemp("verl"), 2, on_any_ranks(CLIP[2]) + ON_TWO_RANKS)


def finite(seen: dict[str, Any], key: str) -> list[float]:
    return [seen[key][i] for i in FINITE]


def check_training(seen: Seen, clip: float) -> None:
    """Steps that are not finite are skipped as verl does, and others clipped."""
    stock, always, never, by_verl = (seen[kind] for kind in ("stock", "always", "never", "always, verl clips"))
    assert always["digests"] == never["digests"]
    for key in ("losses", "norms"):
        assert finite(always, key) == finite(never, key)
        for ours in (always, by_verl):
            assert finite(ours, key) == pytest.approx(finite(stock, key), rel=1e-3)
            assert ours["squares"] == pytest.approx(stock["squares"], rel=1e-3)
    assert always["lrs"] == never["lrs"] == stock["lrs"] and stock["lrs"][:2] == [0.005, 0.01]
    assert always["engine"] == OURS and stock["engine"] == by_verl["engine"] == VERLS
    assert always["printed"].count("WARN: grad_norm is not finite") == 2
    clipped = sum(norm > clip for norm in finite(stock, "norms"))
    assert 0 < clipped < len(FINITE), "both kinds of steps"
    assert always["stats"]["clipped_steps"] == clipped and always["stats"]["skipped_steps"] == 2
    assert always["stats"]["buckets_committed"] > 0 and always["stats"]["buckets_replayed"] > 0
    assert never["stats"]["buckets_speculated"] == 0
    assert by_verl["stats"]["clipped_steps"] == 0, "verl has clipped"
    assert by_verl["stats"]["buckets_undone"] >= clipped, "gradients that verl has clipped were taken again"


def test_one_rank(tmp_path: Path) -> None:
    check_training(seen_by(tmp_path, 1, on_any_ranks(CLIP[1]))[0], CLIP[1])


def test_two_ranks(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        check_training(seen, CLIP[2])
        assert seen["always"]["digests"] == two_ranks[0]["always"]["digests"]
        assert seen["always, verl clips"]["digests"] == seen["never, verl clips"]["digests"]
        for key in ("norms", "digests"):
            assert str(seen["stock in our engine"][key]) == str(seen["stock"][key]), "then the engine is verl's"


def test_micro_batches_and_verls_loss_scaler(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        never, always = seen["never, each"], seen["always, each"]
        for key in ("losses", "norms", "lrs", "digests"):
            assert always[key] == never[key], key
        stats = always["stats"]
        assert stats["buckets_committed"] + stats["buckets_replayed"] > 0
        undone = stats["buckets_undone"] - stats["journal_overflows"]
        assert undone == 0, "a backward that was not the last was taken for it"
        ours, stock = seen["scaled"], seen["stock, scaled"]
        assert [ours["norms"][i] for i in (0, 1, 3)] == pytest.approx([stock["norms"][i] for i in (0, 1, 3)], rel=1e-3)
        assert ours["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert ours["stats"]["skipped_steps"] == 1


def test_offloading_sleeps_and_offloaded_or_resumed_has_the_same_bits(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        (awake,) = seen["bf16"]["host bytes"]
        asleep, _, moved, still, at_last = seen["moved"]["host bytes"]
        assert asleep == moved == still < at_last <= awake, "a model that comes back, for inference, wakes nothing"
        assert seen["state away"]["host bytes"] == [seen["state away"]["host bytes"][0], asleep]
        assert seen["parameters away"]["host bytes"] == [asleep]
        resumed = ("bf16 resumed", "state away resumed", "parameters away resumed")
        for kind in ("moved", "state away", "parameters away", "on demand", *resumed):
            assert seen[kind]["digests"] == seen["bf16"]["digests"], kind
        for kind in resumed:
            assert seen[kind]["norms"] == seen["bf16"]["norms"][2:]
            assert kind == "bf16 resumed" or seen[kind]["host bytes"][-1] == asleep, "asleep again after the load"


def test_adapters_critics_and_fp32_sums(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        for kind in ("adapter", "critic"):
            for key in ("losses", "norms", "squares"):
                assert seen[kind][key] == pytest.approx(seen[f"stock {kind}"][key], rel=1e-3), key
            assert seen[kind]["engine"] == OURS
        assert seen["fp32 sums"]["losses"] == pytest.approx(seen["bf16"]["losses"][:2], rel=1e-2)


def test_errors_name_the_setting(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        assert "override_optimizer_config: max_grad_norm=0.5, which" in seen["taken"]["error"]
        assert "clip_grad is the norm to clip to" in seen["taken"]["error"]
        assert "max_grad_norm=0: every gradient would become 0" in seen["zero"]["error"]
        assert seen["failed"]["error"] == "no room for the step", "not that the optimizer cannot sleep now"
        assert "specualtion" in seen["unknown"]["error"] and "speculation" in seen["unknown"]["error"]

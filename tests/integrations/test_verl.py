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

pytestmark = [needs("verl", "ray", "tensordict", "transformers", "peft"), pytest.mark.in_turn("verl")]

STEPS = 6
OURS, VERLS = "superoffload.integrations.verl", "verl.workers.engine.fsdp.transformer_impl"
BF16 = {"model_dtype": "bf16"}
STATE_AWAY = {**BF16, "optimizer_offload": True}
PARAMS_AWAY = {**BF16, "param_offload": True}


def case(name: str, *actions: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "actions": actions, **more}


CLIP = {1: 1.5, 2: 1.2}  # by the number of ranks: clips some of the first steps


def offload(clip_grad: float = CLIP[2], **options: Any) -> dict[str, Any]:
    given = {"speculation": "always", "bucket_numel": 8192, **options}
    return {"optimizer_impl": "superoffload", "clip_grad": clip_grad, "override_optimizer_config": given}


def never(clip_grad: float = CLIP[2]) -> dict[str, Any]:
    return offload(clip_grad, speculation="never")


TRAIN = f"train {STEPS}"
POISONED = ("train 2", "poison nan", "poison inf", "train 2")
EACH = {"use_no_sync_for_gradient_accumulation": False}  # verl's default: each micro-batch is reduced
STOCK = {"clip_grad": CLIP[2]}
ON_TWO_RANKS = [
    case("stock, poisoned", *POISONED, engines="verl", optim=STOCK),
    case("never, poisoned", *POISONED, optim=never()),
    case("always, poisoned", *POISONED, optim=offload()),
    case("always, poisoned, verl clips", *POISONED, engines="verl", optim=offload()),
    case("scaled", "scale", "train 2", "poison inf", "train 1", optim=offload()),
    case("stock, scaled", "scale", "train 2", "poison inf", "train 1", engines="verl", optim=STOCK),
    case("bf16", "train 2", "save a-2", "train 2", "weigh", optim=offload(), engine=BF16),
    case("bf16 resumed", "load a-2", "train 2", optim=offload(), engine=BF16),
    case("bf16, verl clips", "train 2", "save e-2", "train 2", engines="verl", optim=offload(), engine=BF16),
    case("bf16, verl clips, resumed", "load e-2", "train 2", engines="verl", optim=offload(), engine=BF16),
    case(
        "moved",
        *("train 1", "move cpu optimizer", "move cuda optimizer", "train 1", "move cpu model", "move cuda model"),
        *("train 2", "weigh"),
        optim=offload(),
        engine=BF16,
        away=True,
    ),
    case(
        "state away", "weigh", "train 2", "weigh", "save b-2", "train 2", optim=offload(), engine=STATE_AWAY, away=True
    ),
    case(
        "state away resumed",
        "move cpu optimizer",
        "load b-2",
        "weigh",
        "train 2",
        optim=offload(),
        engine=STATE_AWAY,
        away=True,
    ),
    case("parameters away", "train 2", "weigh", "save c-2", "train 2", optim=offload(), engine=PARAMS_AWAY, away=True),
    case(
        "parameters away resumed",
        "move cpu model",
        "load c-2",
        "weigh",
        "train 2",
        optim=offload(),
        engine=PARAMS_AWAY,
        away=True,
    ),
    case(
        "on demand",
        *("train 2", "infer", "train 2"),
        optim=offload(delivery="on_demand"),
        engine={**STATE_AWAY, **PARAMS_AWAY},
        away=True,
    ),
    case("fp32 sums", "train 2", optim=offload(accumulate_dtype="fp32"), engine={**BF16, "mixed_precision": None}),
    case("stock adapter", "train 2", engines="verl", model={"lora_rank": 4}),
    case("adapter", "train 2", optim=offload(), model={"lora_rank": 4}),
    case("stock critic", "train 2", type="value_model", engines="verl"),
    case("critic", "train 2", type="value_model", optim=offload(1.0)),
    case("failed", "train 1", "fail", optim=offload(), engine=STATE_AWAY, away=True),
    case("taken", optim=offload(max_grad_norm=0.5)),
    case("zero", optim=offload(0.0)),
    case("unknown", optim=offload(specualtion="never")),
]
Seen = dict[str, dict[str, Any]]


def on_any_ranks(clip: float) -> list[dict[str, Any]]:
    return [
        case("stock", TRAIN, engines="verl", optim={"clip_grad": clip}),
        case("stock in our engine", TRAIN, optim={"clip_grad": clip}),
        case("never", TRAIN, optim=never(clip)),
        case("always", TRAIN, optim=offload(clip)),
        case("never, verl clips", TRAIN, engines="verl", optim=never(clip)),
        case("always, verl clips", TRAIN, engines="verl", optim=offload(clip)),
        case("never, each", TRAIN, optim=never(clip), engine=EACH),
        case("always, each", TRAIN, optim=offload(clip), engine=EACH),
    ]


def seen_by(folder: Path, ranks: int, cases: list[dict[str, Any]]) -> list[Seen]:
    """Runs the cases one after another on ``ranks`` processes; returns what each rank saw."""
    (folder / "cases.json").write_text(json.dumps(cases))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "tests.support.verl_program", str(folder), str(folder / "cases.json")]
    done = subprocess.run([*launch, *program], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return seen_by(tmp_path_factory.mktemp("verl"), 2, on_any_ranks(CLIP[2]) + ON_TWO_RANKS)


def check_training(seen: Seen, clip: float) -> None:
    stock, always = seen["stock"], seen["always"]
    for kind in ("", ", each", ", verl clips"):
        for key in ("losses", "norms", "lrs", "digests"):
            assert seen[f"always{kind}"][key] == seen[f"never{kind}"][key], (kind, key)
        assert seen[f"always{kind}"]["losses"] == pytest.approx(stock["losses"], rel=1e-3)
        assert seen[f"always{kind}"]["norms"] == pytest.approx(stock["norms"], rel=1e-3)
        assert seen[f"always{kind}"]["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert seen[f"never{kind}"]["stats"]["buckets_speculated"] == 0
    assert len(stock["losses"]) == STEPS and stock["lrs"][:2] == [0.005, 0.01] and stock["lrs"] == always["lrs"]
    assert always["engine"] == OURS and stock["engine"] == seen["always, verl clips"]["engine"] == VERLS
    clipped = sum(norm > clip for norm in stock["norms"])
    assert 0 < clipped < STEPS, "both kinds of steps"
    assert always["stats"]["clipped_steps"] == clipped
    for kind in ("", ", each"):
        stats = seen[f"always{kind}"]["stats"]
        assert stats["buckets_committed"] > 0 and stats["buckets_replayed"] > 0
        undone = stats["buckets_undone"] - stats["journal_overflows"]
        assert undone == 0, "a backward that was not the last was taken for it"
    stats = seen["always, verl clips"]["stats"]
    assert stats["clipped_steps"] == 0, "verl has clipped"
    assert stats["buckets_undone"] >= clipped, "gradients that verl has clipped were taken again"
    for key in ("losses", "norms", "digests"):
        assert seen["stock in our engine"][key] == stock[key], "with another optimizer the engine is verl's"


def test_one_rank(tmp_path: Path) -> None:
    check_training(seen_by(tmp_path, 1, on_any_ranks(CLIP[1]))[0], CLIP[1])


def test_two_ranks(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        check_training(seen, CLIP[2])
        assert seen["always"]["digests"] == two_ranks[0]["always"]["digests"]


def test_steps_that_are_not_finite_are_skipped_as_verl_does(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        stock, always = seen["stock, poisoned"], seen["always, poisoned"]
        for kind in ("never, poisoned", "always, poisoned", "always, poisoned, verl clips"):
            finite = [value for value in seen[kind]["norms"] if abs(value) < float("inf")]
            assert finite == pytest.approx([stock["norms"][i] for i in (0, 1, 4, 5)], rel=1e-3)
            assert seen[kind]["printed"].count("WARN: grad_norm is not finite") == 2
            assert seen[kind]["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert always["digests"] == seen["never, poisoned"]["digests"]
        assert always["lrs"] == stock["lrs"]
        assert always["stats"]["skipped_steps"] == 2


def test_verls_loss_scaler(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        ours, stock = seen["scaled"], seen["stock, scaled"]
        assert [ours["norms"][i] for i in (0, 1, 3)] == pytest.approx([stock["norms"][i] for i in (0, 1, 3)], rel=1e-3)
        assert ours["squares"] == pytest.approx(stock["squares"], rel=1e-3)
        assert ours["stats"]["skipped_steps"] == 1


def test_offloading_sleeps_and_changes_no_bit(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        bf16 = seen["bf16"]
        (awake,) = bf16["host bytes"]
        for kind in ("moved", "state away", "parameters away", "on demand"):
            assert seen[kind]["digests"] == bf16["digests"], kind
        asleep, _, moved, still, at_last = seen["moved"]["host bytes"]
        assert asleep == moved == still < at_last <= awake, "a model that comes back, for inference, wakes nothing"
        assert seen["state away"]["host bytes"] == [seen["state away"]["host bytes"][0], asleep]
        assert seen["parameters away"]["host bytes"] == [asleep]


def test_checkpoints_resume_to_the_bit(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        for kind in ("bf16 resumed", "state away resumed", "parameters away resumed"):
            assert seen[kind]["digests"] == seen["bf16"]["digests"], kind
            assert seen[kind]["norms"] == seen["bf16"]["norms"][2:]
        assert seen["bf16, verl clips, resumed"]["digests"] == seen["bf16, verl clips"]["digests"]
        asleep = seen["moved"]["host bytes"][0]
        for kind in ("state away resumed", "parameters away resumed"):
            assert seen[kind]["host bytes"][-1] == asleep, "asleep again after the load"


def test_adapters_critics_and_fp32_sums(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        for kind in ("adapter", "critic"):
            assert seen[kind]["losses"] == pytest.approx(seen[f"stock {kind}"]["losses"], rel=1e-3)
            assert seen[kind]["norms"] == pytest.approx(seen[f"stock {kind}"]["norms"], rel=1e-3)
            assert seen[kind]["squares"] == pytest.approx(seen[f"stock {kind}"]["squares"], rel=1e-3)
            assert seen[kind]["engine"] == OURS
        assert seen["fp32 sums"]["losses"] == pytest.approx(seen["bf16"]["losses"][:2], rel=1e-2)


def test_errors_name_the_setting(two_ranks: list[Seen]) -> None:
    for seen in two_ranks:
        assert "override_optimizer_config: max_grad_norm=0.5, which" in seen["taken"]["error"]
        assert "clip_grad is the norm to clip to" in seen["taken"]["error"]
        assert "max_grad_norm=0: every gradient would become 0" in seen["zero"]["error"]
        assert seen["failed"]["error"] == "no room for the step", "not that the optimizer cannot sleep now"
        assert "specualtion" in seen["unknown"]["error"] and "speculation" in seen["unknown"]["error"]

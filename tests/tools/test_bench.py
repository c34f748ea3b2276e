"""The benchmarks run, on little, and write what they print."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adam.eight_bit_peers import PEERS, EightBitPeer
from benchmarks.journal.sizes import plot_journal
from benchmarks.memory.use import is_off
from benchmarks.training.config import ModelConfig, TrainingConfig
from superoffload import kernels
from superoffload.tools.cli import EXIT_OK, EXIT_USAGE
from tests.support.benchmarks import bench as start

SMALL = ["--quiet", "--json", "out.json", "--plot", "out.png"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these two say is the same of a small one."""
    model = ModelConfig(layers=2, hidden=64, mlp=160, sequence=64)
    config = partial(TrainingConfig, model=model)
    for module in ("state.__main__", "demo_runs"):
        monkeypatch.setattr(f"benchmarks.{module}.TrainingConfig", config)


def bench(*arguments: str) -> dict[str, Any]:
    assert start(*arguments, *SMALL) == EXIT_OK
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    report: dict[str, Any] = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert report["machine"]["kernel_isa"] == kernels.current_isa()
    assert report["versions"]["torch"] and report["commit"] and report["command"][:2] == ["python", "-m"]
    return report


def test_adam(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench("adam", "--quick", "--sizes", "1024", "70000", "--threads", "1", "--no-deepspeed")
    printed = capsys.readouterr().out
    names = {row["name"] for row in report["rows"]}
    assert {"step", "journaled", "journaled, 2-byte codes", "undo", "replay", "publish", "limit of step"} <= names
    assert {"torch fused step", "torch fused, same job"} <= names
    reading = [row for row in report["rows"] if row["name"] == "limit of publish, reading alone"]
    assert {row["bytes_per_param"] for row in reading} == {14.0}, "master, both moments, bf16 gradient"
    if "avx512" in kernels.available_isas():
        assert "reading what it reads, and nothing else, takes" in printed
        for operation in ("journaled", "undo", "replay"):
            row = next(row for row in report["rows"] if row["name"] == f"limit of {operation}" and row["numel"] > 70000)
            said = next(line for line in printed.splitlines() if f"avx512: {operation}, times the plain step" in line)
            assert said.endswith(f"; a walk over its bytes alone takes {row['ratio']:.2f} here")
            assert row["ratio_to"] == "step avx512"
    assert {row["isa"] for row in report["rows"] if row["name"] == "step"} == set(kernels.available_isas())
    assert {row["numel"] for row in report["rows"]} >= {1024, 70000}
    for row in report["rows"]:
        assert 0 < row["seconds_min"] <= row["seconds_median"]
        assert row["name"] in printed
    assert 1.0 < report["journal"]["journal_bytes_per_param"] < 2.6
    assert {row["array"] for row in report["accuracy"]} == {"master", "exp_avg", "exp_avg_sq"}
    for row in report["accuracy"]:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"{row['name']}, {row['array']} "))
        assert line.split()[-3:] == [
            f"{row['mean_ulp']:.3f}",
            f"{row['median_largest_ulp']:.2f}",
            f"{row['largest_ulp']:.2f}",
        ]
    assert "DeepSpeedCPUAdam" in printed and "DeepSpeedCPUAdam" not in names


def test_adam_compares_settings_of_state(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "bitsandbytes 8bit", EightBitPeer("torch.optim", "AdamW", 8.0))
    monkeypatch.setitem(PEERS, "torchao 8bit", EightBitPeer("no_such_library", "AdamW8bit", 2.0))
    report = bench("adam", "--quick", "--state", "all", "--threads", "1")
    printed = capsys.readouterr().out
    moved = {
        "fp32": (28, 29, 27, 16),
        "split": (26, 27, 27, 18),
        "bf16": (20, 21, 19, 12),
        "bf16+split": (18, 19, 19, 14),
        "8bit": (16, 17, 15, 10),
        "8bit+split": (14, 15, 15, 12),
    }
    rows = {(row["state"], row["name"]): row for row in report["rows"]}
    for state, expected in moved.items():
        for name, size in zip(("step", "journaled", "undo", "publish"), expected, strict=True):
            row, limit = rows[state, name], rows[state, f"limit of {name}"]
            assert row["bytes_per_param"] == limit["bytes_per_param"] == size, (state, name)
            assert row["ratio_to"] == f"fp32 {name}" and row["ratio"] > 0 and row["of_limit"] > 0
            assert any(line.split()[:2] == [state, name] for line in printed.splitlines())
    assert rows["fp32", "step"]["ratio"] == 1.0
    error = {state: rows[state, "step"]["error"] for state in (*moved, "bitsandbytes 8bit")}
    assert error["fp32"] == error["split"] < 1e-5 and error["bitsandbytes 8bit"] < 1e-5
    assert 1e-4 < error["bf16"] < 1e-2 < error["8bit"] < 1e-1
    assert rows["bitsandbytes 8bit", "step"]["bytes_per_param"] == 8 + 4 + 16
    assert "peer torchao 8bit: no_such_library cannot be imported" in printed
    one = bench("adam", "--quick", "--state", "split", "--threads", "1")
    assert {row["state"] for row in one["rows"]} == {"fp32", "split"}


@pytest.mark.usefixtures("small_model")
def test_journal(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench("journal", "--steps", "20", "--factors", "1", "10")
    printed = capsys.readouterr().out
    plain, clipped = report["rows"]
    assert plain["buckets_replayed"] == 0 < clipped["buckets_replayed"]
    for row in (plain, clipped):
        assert row["name"] in printed
        assert len(row["bytes_per_param"]) == 20
        sizes = [size for size in row["bytes_per_param"][10:] if size is not None]
        assert row["mean_after_step_10"] == pytest.approx(sum(sizes) / len(sizes))
        assert 1.0 < row["mean_after_step_10"] < 3.1
    assert clipped["mean_after_step_10"] > plain["mean_after_step_10"] + 0.2, "larger gradients change state by more"


def test_every_line_of_the_journal_plot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure_class, "savefig", lambda figure, path: figures.append(figure))
    plot_journal({"rows": [{"name": "no clipping", "bytes_per_param": [1.0, None, 1.1]}]}, Path("out.png"))
    (figure,) = figures
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == len(figure.axes[0].get_lines()) == 2
    assert names[0] == "no clipping" and names[1].startswith("1.25: ")


@pytest.mark.usefixtures("small_model")
def test_state(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench("state", "--steps", "20", "--seeds", "2", "--settings", "bf16", "8bit+split")
    names = [(row["setting"], row["seed"]) for row in report["rows"]]
    assert names == [(name, seed) for seed in (0, 1) for name in ("fp32", "bf16", "8bit+split")]
    held_out = {name: row["held_out_loss"] for name, row in zip(names, report["rows"], strict=True)}
    losses = [tuple(row["losses"]) for row in report["rows"]]
    assert len(set(losses)) == len(losses), "each setting and seed makes a difference"
    printed = capsys.readouterr().out
    for row in report["differences"]:
        assert row["differences"] == [held_out[row["setting"], seed] - held_out["fp32", seed] for seed in (0, 1)]
        first, second = row["differences"]
        # Of two values: t of one degree of freedom, times the standard deviation over sqrt(2), half of their distance.
        assert row["half_interval"] == pytest.approx(12.706 * abs(first - second) / 2)
        assert abs(row["mean_difference"]) < 0.5
        assert f"{row['setting']} minus fp32, mean: {row['mean_difference']:+.4f} +- " in printed


@pytest.mark.usefixtures("small_model")
def test_state_continues_where_it_was_ended() -> None:
    asked = ("state", "--steps", "20", "--settings", "8bit", "--continue", "--seeds")
    first = bench(*asked, "1")
    whole = bench(*asked, "2")
    assert whole["rows"][:2] == first["rows"] and len(whole["rows"]) == 4
    assert bench("state", "--steps", "20", "--settings", "8bit", "--seeds", "2")["rows"] == whole["rows"]
    changed = {**whole, "rows": [{**row, "held_out_loss": 9.0} for row in whole["rows"]]}
    Path("out.json").write_text(json.dumps(changed), encoding="utf-8")
    assert bench(*asked, "2")["differences"][0]["differences"] == [0.0, 0.0], "nothing was run again"


@pytest.mark.usefixtures("small_model")
def test_another_librarys_optimizer_steps_masters_as_ours_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "torchao 8bit", EightBitPeer("torch.optim", "AdamW", 8.0))  # whose moments are fp32
    report = bench("state", "--steps", "40", "--seeds", "1", "--settings", "torchao 8bit", "bf16")
    ours, theirs, bf16 = (row["losses"] for row in report["rows"])
    assert len(ours) == 20, "means of two steps each"
    assert theirs[:5] == pytest.approx(ours[:5], rel=1e-3)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.05
    assert theirs != ours != bf16


def test_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench("schedule", "--quick", "--tokens", "8192")
    printed = capsys.readouterr().out
    names = ("model", "delivery", "trace", "wall clock")
    parts = {part: [row for row in report["rows"] if row["part"] == part] for part in names}
    deliveries = {row["contestant"]: row["ratio"] for row in parts["delivery"] if row["machine"] != "Superchip"}
    assert deliveries["eager, before the verdict"] == pytest.approx(deliveries["on demand"], abs=0.01)
    assert deliveries["eager, after the verdict"] > deliveries["on demand"] + 0.2
    ratios = {(row["contestant"], row["clips"]): row["ratio"] for row in parts["model"]}
    assert ratios["another system, synchronous", True] == pytest.approx(1.78, abs=0.01)
    assert ratios["another system, in backward", False] == pytest.approx(1.01, abs=0.01)
    assert ratios["one pass", True] == pytest.approx(1.22, abs=0.01)
    assert 1 <= ratios["adaptive", True] <= ratios["two-phase", True] + 0.005
    assert len(parts["trace"]) == 7
    assert all(row["ratio"] <= 1.03 for row in parts["trace"])
    assert {row["contestant"] for row in parts["wall clock"]} == {
        "synchronous",
        "one pass",
        "speculate",
        "two-phase",
        "adaptive",
    }
    for row in report["rows"]:
        assert 0 < row["seconds_min"] <= row["seconds_median"]
    assert all(row["trace"] in printed for row in parts["trace"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["adam", "--isas", "mmx"], "isas=mmx: not on this machine, which has "),
        (["adam", "--threads", "0"], "expected numbers from 1 to "),
        (["adam", "--numel", "12"], "expected at least 1024 elements"),
        (["adam", "--numel", str(1 << 50)], f"numel={1 << 50}: its arrays take"),
        (["adam", "--sizes", "1024", str(1 << 50)], f"sizes={1 << 50}: its arrays take"),
        (["adam", "--seconds", "nan"], "seconds=nan: expected a positive number"),
        (["adam", "--quick", "--json", "no/such/folder/out.json"], "json"),
        (["journal", "--steps", "5"], "steps=5: expected at least 20"),
        (["journal", "--factors", "0.5"], "factors"),
        (["state", "--seeds", "0"], "seeds"),
        (["state", "--continue"], "expected --json PATH"),
        (["state", "--settings", "torchao 4bit"], "settings: torchao 4bit: torchao cannot be imported"),
        (["schedule", "--parameters", "12"], "parameters=12: expected from 1e6 to 1e13"),
        (["schedule", "--tokens", "0"], "tokens=0: expected positive numbers"),
        (["schedule", "--trace-steps", "30"], "trace_steps=30: expected at least 40"),
        (["schedule", "--numel", "5"], "numel=5: expected at least 65536"),
        (["schedule", "--rounds", "0"], "rounds=0: expected at least 1"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(*arguments) == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's own aim, 3 %, on a tenth of its parameters: enough that what else a process takes hardly counts."""
    assert start("memory", "--numel", "4e7", "--steps", "20", "--quiet", "--json", "out.json") == EXIT_OK
    report = json.loads(Path("out.json").read_text(encoding="utf-8"))
    planned = {row["name"]: row["planned_bytes_per_param"] for row in report["rows"]}
    assert planned == {
        "fp32 moments, whole masters": 18.0,
        "fp32 moments, split masters": 16.0,
        "bf16 moments, whole masters": 14.0,
        "bf16 moments, split masters": 12.0,
        "8bit moments, whole masters": pytest.approx(12.0, abs=0.01),
        "8bit moments, split masters": pytest.approx(10.0, abs=0.01),
    }
    printed = capsys.readouterr().out
    for row in report["rows"]:
        assert f"{row['name']:32} {row['resident_bytes_per_param']:9.2f}" in printed
        assert not is_off(row)
        for name in ("of_stats", "of_planned"):
            assert is_off({**row, name: 1.04}) and is_off({**row, name: 0.96})

"""`superoffload train`: what a run leaves behind, when it fails, and what it refuses before training."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from superoffload import __version__
from superoffload.tools.cli import main
from superoffload.tools.report.plots import event_label, smooth
from superoffload.tools.report.progress import Progress
from superoffload.tools.report.run_folder import check_writable
from superoffload.tools.train.corpus import BatchSource
from superoffload.tools.train.trainer import learning_rate_factor
from tests.support.tiny_run import TINY


def train(out: Path, *options: str) -> int:
    return main(["train", *TINY.split(), "--out", str(out), *options])


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def load(path: Path) -> Any:
    return json.loads(path.read_text(), parse_constant=refuse_constant)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=refuse_constant) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]


def test_training_learns_and_leaves_a_complete_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, copy = tmp_path / "deep" / "run", tmp_path / "summary-copy.json"
    assert train(out, "--steps", "40", "--accumulation", "2", "--json", str(copy)) == 0

    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert all(line["tokens"] == 4 * 32 * 2 and line["stepped"] for line in lines)
    assert [line["step"] for line in lines if line["held_out_loss"] is not None] == [10, 20, 30, 40]

    summary = load(out / "summary.json")
    assert summary == load(copy)
    assert summary["passed"] and summary["problems"] == []
    assert summary["loss"]["held_out_before"] == pytest.approx(math.log(256), abs=0.2)
    assert summary["loss"]["held_out_after"] < summary["loss"]["held_out_before"] - 1.0
    assert summary["loss"]["held_out_after"] == lines[-1]["held_out_loss"]
    assert summary["stats"]["steps"] == 40
    assert summary["versions"]["torch"] == torch.__version__
    assert re.fullmatch("[0-9a-f]{64}", summary["digests"]["master"])
    assert summary["machine"]["kernel_isa"] in summary["machine"]["kernel_isas_available"]

    printed = capsys.readouterr().out
    assert "held-out loss" in printed and "tok/s" in printed and str(out / "report.html") in printed


def test_report_is_one_file_that_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    assert train(tmp_path, "--steps", "20") == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert "superoffload train --data" in page


def test_same_seed_same_bits_and_other_seed_other_bits(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert train(tmp_path / name, "--steps", "12", "--seed", seed, "--quiet") == 0
    a, b, c = (load(tmp_path / name / "summary.json")["digests"] for name in "abc")
    assert a == b
    assert a["master"] != c["master"]


def test_clipping_and_learning_rate_follow_their_settings(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", "20", "--warmup", "4", "--lr", "0.01", "--max-grad-norm", "0.5") == 0
    lines = metrics(tmp_path)
    assert [line["lr"] for line in lines[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert lines[-1]["lr"] < 0.002
    for line in lines:
        assert line["clip_coefficient"] == pytest.approx(min(1.0, 0.5 / (line["grad_norm"] + 1e-6)))
    assert lines[0]["clip_coefficient"] < 1.0


def test_no_clipping_when_asked_for(tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", "12", "--max-grad-norm", "none") == 0
    assert all(line["clip_coefficient"] == 1.0 for line in metrics(tmp_path))


def test_injected_trouble_is_survived_and_recorded(tmp_path: Path) -> None:
    events = "nan@3,inf@5:late,raise@7,drop@9,again@11,lr@13:0.5,clip@15:0.001"
    options = ("--steps", "30", "--speculation", "always", "--max-grad-norm", "50")
    assert train(tmp_path, *options, "--inject", events) == 0
    lines = {line["step"]: line for line in metrics(tmp_path)}
    assert lines[3]["found_inf"] and lines[3]["grad_norm"] is None and lines[5]["found_inf"]
    assert not lines[7]["stepped"] and lines[7]["buckets_abandoned"] > 0
    assert lines[9]["stepped"] and lines[9]["buckets_abandoned"] > 0
    assert lines[11]["buckets_undone"] > 0 and lines[13]["buckets_undone"] > 0
    assert lines[15]["clip_coefficient"] < 0.1 and lines[16]["clip_coefficient"] == 1.0
    scheduled = 3e-3 * learning_rate_factor(13, warmup=3, steps=30)
    assert lines[14]["lr"] == pytest.approx(scheduled), "the schedule must take over again after an injected lr"
    summary = load(tmp_path / "summary.json")
    assert summary["stats"]["skipped_steps"] == 2 and summary["stats"]["steps"] == 27


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_dtypes_and_tied_embeddings(tmp_path: Path, dtype: str, tied: bool) -> None:
    options = ["--steps", "12", "--dtype", dtype, *(["--tied"] if tied else [])]
    assert train(tmp_path, *options) == 0
    assert load(tmp_path / "summary.json")["config"]["dtype"] == dtype


def test_leaner_state_trains(tmp_path: Path) -> None:
    options = ["--steps", "12", "--state-dtype", "bf16", "--master-dtype", "split"]
    assert train(tmp_path, *options) == 0
    config = load(tmp_path / "summary.json")["config"]
    assert (config["state_dtype"], config["master_dtype"]) == ("bf16", "split")


def test_training_that_does_not_learn_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps so small that no bf16 parameter moves: the loss stays where it was."""
    assert train(tmp_path, "--steps", "5", "--lr", "1e-12", "--quiet") == 1
    assert "did not fall" in capsys.readouterr().out
    assert load(tmp_path / "summary.json")["passed"] is False
    assert "Failed." in (tmp_path / "report.html").read_text()


def test_diverging_training_stops_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Steps of 1e38 take the parameters to infinity within a few steps, and the loss to NaN.
    options = ("--steps", "40", "--lr", "1e38", "--weight-decay", "0", "--max-grad-norm", "none", "--quiet")
    assert train(tmp_path, *options) == 1
    assert "diverged" in capsys.readouterr().out
    assert len(metrics(tmp_path)) < 40
    assert load(tmp_path / "summary.json")["loss"]["train_last"] is None


def test_results_of_an_earlier_run_do_not_survive_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--steps", "12", "--quiet") == 0

    def interrupt(self: BatchSource) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchSource, "next", interrupt)
    assert train(tmp_path, "--steps", "12", "--quiet") == 130
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "report.html").exists()
    assert "interrupted; metrics.jsonl holds the finished steps" in capsys.readouterr().err


def test_a_command_without_a_run_folder_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("superoffload.tools.doctor.examine.diagnose", interrupt)
    assert main(["doctor", "--no-bandwidth"]) == 130
    assert capsys.readouterr().err == "superoffload: error: interrupted\n"


def test_without_matplotlib_everything_but_the_plot_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train(tmp_path, "--steps", "12") == 0
    assert not (tmp_path / "plot.png").exists()
    assert "pip install 'superoffload[demo]'" in capsys.readouterr().out
    assert "matplotlib is not installed" in (tmp_path / "report.html").read_text()


def test_without_tqdm_a_terminal_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2, "train") as progress:
        progress.step("loss 1")
        progress.step("loss 2")
    captured = capsys.readouterr()
    assert "superoffload[demo]" in captured.err
    assert captured.out.splitlines() == ["train 1/2  loss 1", "train 2/2  loss 2"]


def test_with_tqdm_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm", reason="needs tqdm: pip install tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(2, "train") as progress:
        progress.step("loss 1")
        progress.step("loss 2")
    captured = capsys.readouterr()
    assert "2/2" in captured.err and "loss 2" in captured.err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--device", "cuda"], "device=cuda: expected cpu"),
        (["--hidden", "33"], "hidden=33 is not divisible by heads=2"),
        (["--kv-heads", "3"], "heads=2 is not divisible by kv_heads=3"),
        (["--steps", "0"], "steps=0"),
        (["--lr", "-1"], "lr=-1"),
        (["--accumulation", "0"], "accumulation=0"),
        (["--bucket-numel", "0"], "bucket_numel=0"),
        (["--threads", "0"], "threads=0"),
        (["--torch-threads", "99999"], "torch_threads=99999: expected at most 1024"),
        (
            ["--dtype", "fp32", "--master-dtype", "split"],
            "master_dtype=split with dtype=fp32: expected bf16 parameters",
        ),
        (["--seed", str(1 << 70)], f"seed={1 << 70}: expected a whole number from 0 to 4294967295"),
        (["--max-corpus-mib", "0"], "max_corpus_mib=0"),
        (["--max-corpus-mib", "nan"], "max_corpus_mib=nan"),
        (["--inject", "nan@400"], "inject=nan@400: step 400"),
        (["--inject", "oops"], "inject=oops"),
        (["--data", "/no/such/text"], "data=/no/such/text: no such file"),
        (["--data", "x" * 5000], "xxx: cannot be read .*too long"),
        (["--max-corpus-mib", "0.001"], "the first part of .* holds 1048 bytes of text, .* with --max-corpus-mib"),
        (["--json", "/no/such/folder/x.json"], "json=/no/such/folder/x.json: the file cannot be written"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert train(tmp_path / "run", "--steps", "12", *options) == 2
    captured = capsys.readouterr()
    assert re.search(f"^superoffload: error: .*{message}", captured.err)
    assert captured.err.count("\n") == 1
    assert "train 1/" not in captured.out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [["--batch", "1000000000000000"], ["--hidden", str(1 << 42)]])
def test_sizes_that_no_memory_holds_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert train(tmp_path / "run", "--steps", "12", *options) == 1
    error = capsys.readouterr().err
    assert error.startswith("superoffload: error: not enough memory: ") and error.count("\n") == 1
    assert error.endswith("choose smaller sizes (model, batch, sequence)\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore lines"), "CUDA out of memory. Tried to"),
        (MemoryError(), "not enough memory: an allocation failed; choose"),
    ],
)
def test_every_way_to_run_out_of_memory_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    said: str,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("superoffload.tools.cli.train.run", fails)
    assert train(tmp_path / "run", "--steps", "12") == 1
    shown = capsys.readouterr().err
    assert said in shown and shown.count("\n") == 1


def test_unwritable_run_folder_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert train(tmp_path / "file" / "run", "--steps", "12") == 2
    captured = capsys.readouterr()
    assert "the run folder cannot be written" in captured.err and "--out" in captured.err
    assert "held-out loss" not in captured.out


def test_corpus_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert train(tmp_path / "run", "--data", str(tmp_path / "short.txt")) == 2
    assert "9 bytes of text, too short" in capsys.readouterr().err


def test_the_learning_rate_of_a_step_is_the_one_that_it_used(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "4", "--warmup", "4", "--lr", "0.004", "--inject", "lr@3:0.5")
    assert [line["lr"] for line in metrics(tmp_path)] == pytest.approx([0.001, 0.002, 0.0015, 0.004])


def test_version_and_help_do_not_load_torch() -> None:
    script = (
        "import sys; from superoffload.tools.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stop: status = stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'\n"
        "sys.exit(status)"
    )
    for argument, expected in (("--version", f"superoffload {__version__}"), ("--help", "verify")):
        done = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout


def test_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "superoffload"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"superoffload {__version__}\n")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: superoffload" in done.stderr


def test_smoothing_neither_lags_nor_invents() -> None:
    ramp = [float(value) for value in range(50)]
    assert smooth(ramp) == ramp
    assert smooth([1.0, 1.0, math.nan, 1.0, 1.0]) == [1.0] * 2 + [1.0] + [1.0] * 2
    assert math.isnan(smooth([math.nan])[0])
    assert smooth([]) == []


def test_event_labels_are_short() -> None:
    assert [event_label(text) for text in ("nan@4", "clip@8-9:0.5x:late")] == ["nan", "clip 0.5x late"]


@pytest.mark.parametrize("chosen, expected", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_torch_threads_sleep_unless_told_otherwise(chosen: str | None, expected: str) -> None:
    script = (
        "import os; from superoffload.tools.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment.update({"OMP_WAIT_POLICY": chosen} if chosen else {})
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.split()[-1] == expected


def test_full_disk_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs Linux: writes to /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    assert train(tmp_path, "--steps", "5") == 1
    assert re.search(r"^superoffload: error: .*metrics.jsonl: cannot be written \(No space", capsys.readouterr().err)


def test_checking_an_output_file_leaves_nothing_behind(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "--json", str(tmp_path / "new.json"), "--data", "/no/such/text") == 2
    check_writable(str(tmp_path / "new.json"), "json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("{}")
    check_writable(str(tmp_path / "old.json"), "json")
    assert (tmp_path / "old.json").read_text() == "{}"

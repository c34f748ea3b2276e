"""`superoffload report`: runs side by side, in a page that loads nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from superoffload.errors import ArgumentError
from superoffload.tools.cli import main
from superoffload.tools.report.recorded_runs import load_runs
from superoffload.tools.train.run_digests import STATE_PARTS
from tests.support.tiny_run import TINY


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three short runs: synchronous and speculative with the same bits, and another seed; and one that broke off."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in {
        "never": ["--speculation", "never"],
        "always": ["--speculation", "always"],
        "other": ["--speculation", "always", "--seed", "7"],
    }.items():
        assert main(["train", *TINY.split(), "--steps", "12", "--quiet", "--out", str(folder / name), *options]) == 0
    broken = folder / "broken"
    broken.mkdir()
    lines = (folder / "never/metrics.jsonl").read_text().splitlines()[:5]
    (broken / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def report(runs: Path, out: Path, *names: str) -> int:
    return main(["report", *(str(runs / name) for name in names), "--out", str(out), "--json", str(out) + ".json"])


def test_page_compares_and_loads_nothing(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install matplotlib")
    out = tmp_path / "page.html"
    assert report(runs, out, "never", "always", "broken") == 0
    page = out.read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert "the run did not end" in page and "superoffload train" in page
    assert re.search("<td>speculation</td>.*never.*always", page)
    shown = capsys.readouterr().out
    assert "broken: 5 steps" in shown and "did not end" in shown and "held-out loss" in shown


def test_figures_are_those_of_the_runs(runs: Path, tmp_path: Path) -> None:
    assert report(runs, tmp_path / "page.html", "never", "always", "broken") == 0
    values = json.loads((tmp_path / "page.html.json").read_text())
    never, always, broken = values["runs"]
    summary = json.loads((runs / "never/summary.json").read_text())
    assert never["tokens_per_second"] == pytest.approx(summary["tokens_per_second"], rel=1e-3)
    assert never["held_out_loss_after"] == summary["loss"]["held_out_after"]
    assert never["optimizer_seconds_exposed"] == pytest.approx(summary["optimizer_seconds_exposed"])
    assert never["peak_host_memory_bytes"] > 50 << 20
    assert never["digests"] == always["digests"]
    assert (broken["ended"], broken["passed"], broken["clip_rate"], broken["steps"]) == (False, False, None, 5)
    assert values["different_settings"]["speculation"] == ["never", "always", None]


@pytest.mark.parametrize("pair, same", [(("never", "always"), True), (("never", "other"), False)])
def test_same_bits_are_seen(runs: Path, tmp_path: Path, pair: tuple[str, str], same: bool) -> None:
    assert report(runs, tmp_path / "page.html", *pair) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="ok">equal<') == (4 if same else 0)
    assert page.count('class="no">different<') == (0 if same else 4)


def test_one_run_and_no_matplotlib(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(runs, tmp_path / "page.html", "never") == 0
    page = (tmp_path / "page.html").read_text()
    assert "One run" in page and "matplotlib is not installed" in page and "Settings that differ" not in page


def test_names_are_as_long_as_they_must_be(runs: Path, tmp_path: Path) -> None:
    twin = tmp_path / "never"
    twin.mkdir()
    (twin / "metrics.jsonl").write_text((runs / "broken/metrics.jsonl").read_text())
    names = [run.name for run in load_runs([str(runs / "never"), str(twin)])]
    assert names == [f"{runs.name}/never", f"{tmp_path.name}/never"]
    assert load_runs([str(twin)])[0].name == "never"


@pytest.mark.parametrize(
    "text, message, status",
    [
        (None, "metrics.jsonl cannot be read", 2),
        ("", "no finished step", 2),
        ("{", "damaged", 1),
        ('{"a": 1}', "not written by", 2),
    ],
)
def test_folders_that_are_no_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str, status: int
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == status
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def step_with(**values: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        first, *rest = (run / "metrics.jsonl").read_text().splitlines()
        (run / "metrics.jsonl").write_text("\n".join([json.dumps({**json.loads(first), **values}), *rest]))

    return change


def summary_with(**values: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, **values}))

    return change


def text_of(name: str, text: str | bytes) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return change


def fifo(run: Path) -> None:
    (run / "summary.json").unlink()
    os.mkfifo(run / "summary.json")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "metrics cut off": text_of("metrics.jsonl", '{"step": 1, "lo'),
    "metrics no text": text_of("metrics.jsonl", b"\xff\xfe\x00"),
    "metrics nested": text_of("metrics.jsonl", "[" * 100_000 + "]" * 100_000),
    "a loss in words": step_with(loss="low"),
    "no seconds": step_with(seconds=0),
    "seconds null": step_with(seconds=None),
    "tokens a list": step_with(tokens=[1]),
    "seconds beyond all": step_with(seconds=10**400),
    "a step in words": step_with(step="x"),
    "not a number": text_of("metrics.jsonl", '{"step": 1, "loss": NaN, "seconds": NaN, "tokens": 1}'),
    "summary cut off": text_of("summary.json", '{"command": "train", '),
    "summary a pipe": fifo,
    "summary nested": text_of("summary.json", '{"command": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "no stats": summary_with(stats=None),
    "stats in words": summary_with(stats={"clip_rate": "x"}),
    "no digests": summary_with(digests={}),
    "digests numbered": summary_with(digests=dict.fromkeys(STATE_PARTS, 1)),
    "no loss": summary_with(loss=[]),
    "config a list": summary_with(config=[]),
    "model a string": summary_with(config={"model": "x"}),
    "parameters null": summary_with(parameters=None),
    "memory in words": summary_with(peak_host_memory_bytes="much"),
    "passed a number": summary_with(passed=1),
    "a command of numbers": summary_with(command_line=[1]),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_runs_are_named(damage: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs / "never", tmp_path / "run")
    DAMAGE[damage](tmp_path / "run")
    assert main(["report", str(runs / "always"), str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"superoffload: error: run {tmp_path}/run: damaged (") and said.count("\n") == 1
    assert len(said) < 600 and not (tmp_path / "page.html").exists()


def test_names_do_not_steer_the_terminal(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are they formulas for the plot, nor stop the page where they are no valid text."""
    name = "\x1b[2J$x_{$\udcff\u202e"
    shutil.copytree(runs / "never", tmp_path / name)
    summary_with(command_line=["superoffload", "\ud800\x1b"])(tmp_path / name)
    out = tmp_path / "page\x1b.html"
    assert main(["report", str(tmp_path / name), str(runs / "always"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\\x1b[2J$x_{$\\udcff\\u202e: 12 steps" in said
    assert "\x1b" not in out.read_text() and "\\ud800" in out.read_text()
    assert main(["report", str(tmp_path / f"no{name}"), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "\\x1b[2J" in said
    for path in ("a\0b", "x" * 5000):
        assert main(["report", path, "--out", str(out)]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_lines_that_are_no_steps_cost_no_memory(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "never", tmp_path / "run")
    text = b"{}\n" * (1 << 20)
    (tmp_path / "run" / "metrics.jsonl").write_bytes(text)
    tracemalloc.start()
    try:
        with pytest.raises(ArgumentError, match="not written by superoffload train"):
            load_runs([str(tmp_path / "run")])
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)
    finally:
        tracemalloc.stop()


def test_the_same_run_twice_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "never"), str(runs / "never")]) == 2
    assert "given twice" in capsys.readouterr().err

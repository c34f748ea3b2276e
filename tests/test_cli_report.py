"""`superoffload report`: runs side by side, in a page that loads nothing."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from superoffload.cli import main
from superoffload.reporting.comparison import load_runs
from tests.test_cli_train import TINY


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
    "text, message",
    [
        (None, "metrics.jsonl cannot be read"),
        ("", "no finished step"),
        ("{", "damaged"),
        ('{"a": 1}', "not written by"),
    ],
)
def test_folders_that_are_no_runs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_the_same_run_twice_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "never"), str(runs / "never")]) == 2
    assert "given twice" in capsys.readouterr().err

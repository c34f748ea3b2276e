"""Figures of README and documentation are those of benchmarks/results; what README links to and types exists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from benchmarks.adam.report import Target, targets
from benchmarks.asleep import SETTINGS as SLEEPERS
from benchmarks.asleep import name_of
from superoffload.tools.cli import build_parser
from tests.support.checkout import ROOT

README = (ROOT / "README.md").read_text()


def recorded(name: str) -> Any:
    return json.loads((ROOT / "benchmarks/results" / f"{name}.json").read_text())


def lines_of(page: str) -> list[str]:
    """Without the marks of bold type."""
    return (ROOT / "docs" / page).read_text().replace("**", "").splitlines()


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


# ---- README -------------------------------------------------------------------------------------------------------


def test_links_of_the_readme_lead_somewhere() -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", README) if not target.startswith("https://")]
    assert len(targets) > 20
    for target in targets:
        name, _, anchor = target.partition("#")
        assert (ROOT / name).exists(), f"README links to {target}"
        assert not anchor or anchor in anchors(ROOT / name), f"README links to {target}, and there is no such heading"


def test_commands_of_the_readme_are_accepted() -> None:
    found = re.findall(r"`superoffload ((?:train|verify|plan|doctor|bench) [^`]+)`", README)
    commands = [words for words in map(shlex.split, found) if "|" not in words]
    assert ["verify", "--ranks", "2", "--engine", "fsdp2"] in commands
    for words in commands:
        try:
            build_parser().parse_args(words)
        except SystemExit:
            pytest.fail(f"README: superoffload {' '.join(words)} is not accepted")


def test_the_loop_of_the_readme_trains() -> None:
    class Answer:
        def __init__(self, values: torch.Tensor) -> None:
            self.loss = values.square().mean()

    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", README)
    layer = torch.nn.Linear(4, 2)
    before = layer.weight.detach().clone()
    names: dict[str, Any] = {"model": torch.nn.Sequential(layer), "data": [torch.randn(3, 4) for _ in range(3)]}
    names["model"].register_forward_hook(lambda module, given, answer: Answer(answer))
    exec(compile(block, "README.md", "exec"), names)
    assert names["optimizer"].stats()["steps"] == 3 and not torch.equal(layer.weight, before)
    names["optimizer"].close()


def test_ratios_of_the_readme_are_those_that_were_recorded() -> None:
    ours = [row["ratio"] for row in recorded("deepspeed-x86")["rows"] if row["name"] != "stock"]
    assert f"a step takes {min(ours):.2f} to {max(ours):.2f} times as long as with stock" in README
    clips = {(row["tokens"], row["contestant"]): row["ratio"] for row in of_the_model(clips=True)}
    eight, four = (
        [clips[tokens, name] for name in ("adaptive", "one pass", "another system, synchronous")]
        for tokens in (8192, 4096)
    )
    text = "{:.2f} times its bound with 8 k tokens (one pass {:.2f}, a synchronous system by arithmetic {:.2f})"
    in_one_line = " ".join(README.split())
    assert text.format(*eight) in in_one_line
    assert "{:.2f} ({:.2f}, {:.2f})".format(*four) in in_one_line


# ---- the tables of the documentation ------------------------------------------------------------------------------


def test_the_table_of_deepspeed() -> None:
    rows: dict[Any, dict[str, Any]] = {}
    for row in recorded("deepspeed-x86")["rows"]:
        rows.setdefault((row["ranks"], row["clip"]), {})[row["name"]] = row
    assert len(rows) == 6
    for (ranks, clip), by_name in rows.items():
        stock, *ours = (by_name[name] for name in ("stock", "superoffload", "superoffload, on demand"))
        cells = [str(ranks), str(clip or "off")]
        for key, ratio in (("seconds_median", "ratio"), ("optimizer_seconds_median", "optimizer_ratio")):
            cells += [f"{stock[key] * 1e3:.0f}", *(f"{row[key] * 1e3:.0f} (x {row[ratio]:.2f})" for row in ours)]
        cells.append(" / ".join(f"{row['host_bytes'] / 2**20:.0f}" for row in (stock, *ours)))
        assert f"| {' | '.join(cells)} |" in lines_of("deepspeed.md")


def test_what_the_rank_checks_cost() -> None:
    text = " ".join(lines_of("ranks.md"))
    checks = {row["name"]: row for row in recorded("ranks-x86")["rows"]}
    light, full = checks["light"], checks["full"]
    own = f"light check's own work is {light['check_seconds_median'] * 1e3:.1f} ms, {light['of_step']:.1%} of a step"
    assert own in text
    assert f"full check's {full['check_seconds_median'] * 1e3:.0f} ms, {full['of_step']:.0%}" in text
    assert f"{light['notice_seconds_median'] * 1e3:.0f} ms here, {light['notice_of_step']:.1%} of a step" in text


def test_the_tables_of_who_owns_what() -> None:
    lines = lines_of("benchmarks.md")
    paper = recorded("ranks-on-paper")["rows"]
    assert f"of a model with {paper[0]['numel'] / 1e9:.2f} billion parameters" in " ".join(lines)
    for row in paper:
        cells = [row["name"], str(row["parameters"]), str(row["exchanges"]), f"{row['bytes_sent']:,}"]
        cells += [f"{row['seconds_median']:.2f}", str(row["step_bytes"]), f"{1e3 * row['step_seconds_median']:.1f}"]
        assert f"| {' | '.join(cells)} |" in lines
    for row in recorded("ranks-meshes-x86")["rows"]:
        digits = {"made": 0, "told": 0, "told_cpu": 1, "step": 0, "exchange": 1, "exchange_cpu": 2}
        cells = [f"{1e3 * row[f'{part}_seconds_median']:.{count}f}" for part, count in digits.items()]
        assert row["ranks"] == 8 and f"| {row['name']} | {' | '.join(cells)} |" in lines


def test_what_noticing_writes_costs() -> None:
    shares = {row["name"]: f"{row['share']:.1%}" for row in recorded("noticing-x86")["rows"]}
    for tokens in (128, 512, 2048):
        cells = [shares[f"{dtype}, {tokens} tokens"] for dtype in ("bf16", "fp32")]
        assert f"| {tokens} | {' | '.join(cells)} |" in lines_of("edits.md")


def of_the_model(*, clips: bool) -> list[dict[str, Any]]:
    rows = recorded("schedule")["rows"]
    return [row for row in rows if row["part"] == "model" and row["clips"] is clips]


def test_the_table_of_the_schedule() -> None:
    ratios = {
        (row["tokens"], row["contestant"], clips): row["ratio"]
        for clips in (False, True)
        for row in of_the_model(clips=clips)
    }
    columns = [
        ("another system, synchronous", True),
        ("another system, in backward", False),
        ("speculate", False),
        ("adaptive", False),
        ("one pass", True),
        ("two-phase", True),
        ("adaptive", True),
    ]
    for tokens in (2048, 4096, 6144, 8192, 12288):
        cells = " | ".join(f"{ratios[tokens, name, clips]:.2f}" for name, clips in columns)
        assert f"| {tokens} | {cells} |" in lines_of("pipeline.md")


def test_the_table_of_deliveries() -> None:
    found: dict[int, list[str]] = {}
    for row in recorded("schedule")["rows"]:
        if row["part"] == "delivery":
            found.setdefault(row["tokens"], []).append(f"{row['ratio']:.2f}")
    assert len(found) == 5
    for tokens, cells in found.items():
        assert f"| {tokens} | {' | '.join(cells)} |" in lines_of("pipeline.md")


def test_the_table_of_sequences_of_verdicts() -> None:
    found: dict[str, list[str]] = {}
    for row in recorded("schedule")["rows"]:
        if row["part"] == "trace":
            found.setdefault(row["name"].partition("adaptive, ")[2], []).append(f"{row['ratio']:.3f}")
    assert len(found) == 7
    for name, ratios in found.items():
        shown = name.replace("random ", "random, ").replace("step 1000", "step 1000, then never")
        assert f"| {shown} | {' | '.join(ratios)} |" in lines_of("pipeline.md")


def test_the_table_of_wall_clock_time() -> None:
    found: dict[str, dict[bool, str]] = {}
    for row in recorded("schedule-x86")["rows"]:
        found.setdefault(row["contestant"], {})[row["clips"]] = (
            f"{row['seconds_median'] * 1e3:.1f} ({row['of_bound']:.2f})"
        )
    shown = {"synchronous": "synchronous, eager", "one pass": "one pass, on demand"}
    assert len(found) == 5
    for name, cells in found.items():
        assert f"| {shown.get(name, name)} | {cells[False]} | {cells[True]} |" in lines_of("pipeline.md")


def test_the_table_of_clipping() -> None:
    for run in recorded("clip_study")["runs"]:
        rows = run["rows"]
        assert [row["step"] for row in rows] == list(range(100, 3001, 100))
        counted = ("buckets_speculated", "buckets_stepped", "buckets_replayed", "journal_bytes")
        total = {name: sum(row[name] for row in rows) for name in counted}
        speculated = total["buckets_speculated"]
        buckets = (
            speculated + total["buckets_stepped"]
        ) / 3000  # of each step, but for one that was undone and stepped
        clipped = [rows[0]["clip_rate"], rows[9]["clip_rate"], rows[29]["clip_rate"]]
        clipped.append(sum(row["clipped_steps"] for row in rows) / 3000)
        shares = [
            *clipped,
            sum(row["steps_that_speculated"] for row in rows) / 30,
            total["buckets_replayed"] / speculated,
        ]
        journal = total["journal_bytes"] / (speculated * run["parameters"] / round(buckets))
        cells = [f"{run['lr']:g}", *(f"{share:.0%}" for share in shares), f"{journal:.2f}"]
        assert f"| {' | '.join(cells)} |" in lines_of("clipping.md")


def test_the_journals_table_is_what_was_recorded_and_its_aim_is_met() -> None:
    text = "\n".join(lines_of("benchmarks.md"))
    rows = recorded("journal")["rows"]
    assert [row["factor"] for row in rows] == [1, 3, 10, 30, 100]
    for row in rows:
        assert row["steps"] >= 300 and len(row["bytes_per_param"]) == row["steps"]
        shown = f"| {row['mean_after_step_10']:.2f} | {row['largest_after_step_10']:.2f} | {row['buckets_speculated']} "
        assert row["buckets_speculated"] >= 2000
        late = f"{row['overflows_after_step_10']} | {row['buckets_replayed']} | {row['reserved_bytes_per_param']:.2f}"
        assert f"{shown}| {row['journal_overflows']} | {late} |" in text, row["name"]
    assert rows[0]["mean_after_step_10"] <= 1.25
    assert round(rows[0]["reserved_bytes_per_param"], 2) <= 1.5
    assert rows[0]["overflows_after_step_10"] < rows[0]["buckets_speculated"] / 1000


def test_the_table_of_host_memory_is_what_was_recorded_and_its_aim_is_met() -> None:
    rows = recorded("memory")["rows"]
    assert len(rows) == len(STATES) and all(row["numel"] > 3.8e8 for row in rows)
    for row in rows:
        sizes = [row[f"{size}_bytes_per_param"] for size in ("resident", "stats", "peak", "planned")]
        assert f"| {row['name']} | {' | '.join(f'{size:.2f}' for size in sizes)} |" in lines_of("benchmarks.md")
        assert abs(row["of_stats"] - 1) <= 0.03 and abs(row["of_planned"] - 1) <= 0.03


def test_the_table_of_steps_in_place_is_what_was_recorded() -> None:
    rows = recorded("in_place")["rows"]
    for row in rows:
        cells = (
            f"{1e9 * row['seconds_median'] / row['numel']:.3f} | {row['ratio']:.2f} | {row['host_bytes_per_param']:.2f}"
        )
        assert f"| {row['name']} | {cells} |" in lines_of("benchmarks.md")
    in_place, *others = rows
    assert in_place["name"] == "in place" and round(in_place["host_bytes_per_param"]) == 12
    assert all(row["ratio"] >= 1.3 and row["host_bytes_per_param"] > 15.9 for row in others)


def test_the_table_of_sleep_is_what_was_recorded() -> None:
    rows = recorded("asleep")["rows"]
    assert [row["name"] for row in rows] == [name_of(*setting) for setting in SLEEPERS]
    for row in rows:
        seconds = ("sleep", "wake", "step", "step_behind_wake")
        sizes = f"{row['resident_bytes_given_back_per_param']:.2f} | {row['kept_bytes_per_param']:.2f}"
        cells = " | ".join(f"{row[f'seconds_{which}_median']:.3f}" for which in seconds)
        assert f"| {row['name']} | {cells} | {sizes} |" in lines_of("rl.md")


@pytest.mark.parametrize("report", ["hybrid_device", "hybrid_device_large"])
def test_the_tables_of_megatrons_class(report: str) -> None:
    rows: dict[Any, dict[str, Any]] = {}
    for row in recorded(report)["rows"]:
        rows.setdefault((row["overlap"], row["what"]), {})[row["name"]] = row
    assert len(rows) == 3
    for (overlap, what), by_name in rows.items():
        ours, *torchs = (by_name[name] for name in ("CPUAdamW", "torch fused", "torch"))
        cells = [what, "on" if overlap else "off", f"{ours['seconds_median'] * 1e3:.0f}"]
        cells += [f"{row['seconds_median'] * 1e3:.0f} (x {row['ratio']:.2f})" for row in torchs]
        assert f"| {' | '.join(cells)} |" in lines_of("megatron.md")


STATES = ("fp32", "split", "bf16", "bf16+split", "8bit", "8bit+split")


def test_the_table_of_settings_is_what_was_recorded() -> None:
    rows = {(row["name"], row["state"]): row for row in recorded("adam-state-x86")["rows"] if row["isa"]}
    labels = {"journaled": "journaled, one-byte codes", "journaled, 2-byte codes": "journaled, two-byte codes"}
    for name in dict.fromkeys(name for name, _ in rows):
        of_states = [rows[name, state] for state in STATES]
        cells = [f"{1e9 * row['seconds_median'] / row['numel']:.3f} ({row['of_limit']:.2f})" for row in of_states]
        assert f"| {labels.get(name, name)} | {' | '.join(cells)} |" in lines_of("benchmarks.md")
    assert rows["step", "fp32"]["seconds_median"] / rows["step", "split"]["seconds_median"] >= 1.05


def test_steps_over_the_cache_show_that_8_bit_moments_are_bound_by_computing() -> None:
    def step(report: str, state: str) -> float:
        rows = [row for row in recorded(report)["rows"] if row["name"] == "step" and row["state"] == state]
        return float(1e9 * rows[0]["seconds_median"] / rows[0]["numel"])

    text = "\n".join(lines_of("benchmarks.md"))
    for state in ("fp32", "8bit+split"):
        assert f"{step('adam-state-x86-cache', state):.3f} ns" in text
    assert step("adam-state-x86-cache", "fp32") < 0.55 * step("adam-state-x86", "fp32")
    assert step("adam-state-x86-cache", "8bit+split") > step("adam-state-x86", "8bit+split")


def test_the_table_of_peers_with_few_bits_is_what_was_recorded() -> None:
    rows = [row for row in recorded("adam-state-x86")["rows"] if row["name"] == "step"]
    assert len(rows) == len(STATES) + 3
    for row in rows:
        time, moved = f"{1e9 * row['seconds_median'] / row['numel']:.3f}", f"{row['bytes_per_param']:.1f}"
        line = f"| {row['state']} | {time} | {1 / row['ratio']:.2f} | {moved} | {row['error']:.1e} |"
        assert line in lines_of("benchmarks.md"), line
    ours = next(row for row in rows if row["state"] == "8bit")
    theirs = [row for row in rows if row["state"] not in STATES]
    assert all(row["seconds_median"] > 40 * ours["seconds_median"] and row["error"] > ours["error"] for row in theirs)


def test_the_table_of_leaner_state_is_what_was_recorded() -> None:
    columns = []
    for report, steps in ((recorded("state-text"), 1000), (recorded("state-encoder"), 200)):
        whole = [row["held_out_loss"] for row in report["rows"] if row["setting"] == "fp32"]
        assert len(whole) == 8 and report["steps"] == steps
        column = {"fp32": f"{fmean(whole):.4f}"}
        for row in report["differences"]:
            interval = f"{row['mean_difference']:+.4f} ± {row['half_interval']:.4f}"
            column[row["setting"]] = f"{row['held_out_loss']:.4f}, {interval}"
            assert len(row["differences"]) == 8
            shows_a_loss = row["mean_difference"] > row["half_interval"]
            assert shows_a_loss is (row["setting"] == "bf16+split" and steps == 200), "the page names the one that does"
        columns.append(column)
    for setting in columns[0]:
        assert f"| {setting} | {' | '.join(column[setting] for column in columns)} |" in lines_of("benchmarks.md")


def test_the_table_of_formats_of_moments_is_what_was_recorded() -> None:
    rows = recorded("moment_formats")["rows"]
    cells: dict[str, list[str]] = {}
    for row in rows:
        size, largest = (f"{row[key]:.2f}" if row[key] < 100 else f"{row[key]:.0e}" for key in ("size", "largest"))
        cells.setdefault(row["name"], []).append(f"{row['correlation']:.3f}, {size}, {largest}")
    for name, of_format in cells.items():
        assert f"| {name} | {' | '.join(of_format)} |" in lines_of("benchmarks.md")
    ours = [row for row in rows if row["name"] == "ours"]
    assert all(row["largest"] < 2 * row["largest_exact"] and row["zeros_of_exp_avg_sq"] == 0 for row in ours)


def test_the_table_of_errors_is_what_was_recorded() -> None:
    text = "\n".join(lines_of("kernel.md"))
    figures: dict[str, str] = {}
    for row in recorded("adam-x86")["accuracy"]:
        shown = f" {row['mean_ulp']:.3f}, {row['median_largest_ulp']:.1f}, {row['largest_ulp']:.1f} |"
        figures[row["name"]] = figures.get(row["name"], "|") + shown
    assert len(figures) == 3
    assert all(line in text for line in figures.values()), figures


def test_the_aims_of_the_kernels_are_what_two_runs_gave() -> None:
    runs = [{target.text: target for target in targets(recorded(name))} for name in ("adam-x86", "adam-x86-short")]
    shown = [
        line.replace("AVX-512", "avx512").replace("AVX2", "avx2")
        for line in lines_of("benchmarks.md")
        if re.match(r"\| [^|]+ \| [<>]= [\d.]+ \| [\d.]+ \| [\d.]+ \|", line)
    ]
    assert len(shown) == len(runs[0]) == len(runs[1]) == 12
    for found, line in zip(zip(*(run.values() for run in runs), strict=True), sorted_as(shown, runs[0]), strict=True):
        assert f"| {found[0].value:.2f} | {found[1].value:.2f} |" in line, found
        said = {2: "met |", 1: "met once |", 0: "missed"}[sum(target.met for target in found)]
        assert said in line, line


def sorted_as(shown: list[str], aims: Mapping[str, Target]) -> list[str]:
    """The table's lines in the order of the command's aims: by instruction set, peers last."""
    words = {
        "torch fused, same job, times our step": "the same job with torch",
        "DeepSpeedCPUAdam, same job, times our step": "the same job with DeepSpeed",
        "one core: best peer's bare fp32 step, times our step": "one core: the better peer",
    }
    names = [words.get(aim, aim.replace("times the plain step", "times the step")) for aim in aims]
    return [next(line for line in shown if line.startswith(f"| {name}")) for name in names]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_tables_of_the_kernels(threads: int) -> None:
    rows = [row for row in recorded("adam-x86")["rows"] if row["threads"] == threads]
    rows = [row for row in rows if row["numel"] == max(row["numel"] for row in rows if row["name"] == "undo")]
    labels = {"journaled": "journaled, one-byte codes", "journaled, 2-byte codes": "journaled, two-byte codes"}
    for name in ("step", "journaled", "journaled, 2-byte codes", "undo", "replay", "publish"):
        limit, avx512, avx2 = (
            next(row for row in rows if row["name"] == full and row["isa"] == isa)
            for full, isa in ((f"limit of {name}", ""), (name, "avx512"), (name, "avx2"))
        )
        cells = [f"{limit['seconds_median'] * 1e3:.1f} ms"]
        for row in (avx512, avx2):
            cells += [f"{row['seconds_median'] * 1e3:.1f} ms", f"{row['ratio']:.2f}"]
        assert f"| {labels.get(name, name)} | {' | '.join(cells)} |" in lines_of("benchmarks.md")

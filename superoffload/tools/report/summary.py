"""Builds the parts that the summaries and reports of all commands share."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from superoffload.tools.report.machine_facts import machine_facts, version_facts
from superoffload.tools.report.page import Cell, Page, code
from superoffload.tools.report.run_folder import RunFolder
from superoffload.tools.train.record import BUCKET_FATES, finite_or_none

FATES_IN_WORDS = {
    "committed": "no clip: the speculated step was kept",
    "undone": "more gradient arrived, or lr changed: the old bits were restored, the bucket stepped later",
    "replayed": "clipped: undone and stepped again with the clip coefficient, in one pass",
    "skipped": "NaN or Inf somewhere: undone, the whole step left out",
    "abandoned": "step() was never called: undone when the gradients were dropped",
}


def common_summary(
    command: str, command_line: Sequence[str], problems: Sequence[str], seconds: float, torch_threads: int
) -> dict[str, Any]:
    return {
        "command": command,
        "command_line": list(command_line),
        "passed": not problems,
        "problems": list(problems),
        "seconds": round(seconds, 3),
        "torch_threads": torch_threads,
        "machine": machine_facts(),
        "versions": version_facts(),
    }


def json_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the optimizer's statistics without values that JSON cannot hold."""
    return {name: finite_or_none(value) for name, value in stats.items() if isinstance(value, (int, float, str))}


def fate_lines(stats: Mapping[str, Any]) -> list[str]:
    """Returns the bucket counts as aligned text lines."""
    lines = [f"  speculated {stats['buckets_speculated']:>8}"]
    lines += [f"  {fate:<10} {stats[f'buckets_{fate}']:>8}   {FATES_IN_WORDS[fate]}" for fate in BUCKET_FATES]
    return lines


def add_fates(page: Page, stats: Mapping[str, Any]) -> None:
    page.heading("What became of the speculated buckets")
    rows: list[Sequence[Cell]] = [(fate, FATES_IN_WORDS[fate], stats[f"buckets_{fate}"]) for fate in BUCKET_FATES]
    rows.append(("speculated", "the sum of these", stats["buckets_speculated"]))
    page.table(("fate", "what it means", "buckets"), rows, numeric_from=2)


def add_plot(page: Page, folder: RunFolder, alternative: str, hint: str) -> None:
    if folder.plot_path.exists():
        page.image(folder.plot_path, alternative)
    else:
        page.paragraph(hint)


def add_reproduction(page: Page, summary: Mapping[str, Any]) -> None:
    """Adds command line, settings, text, machine and versions: all that is needed to run it again."""
    page.heading("Run it again")
    page.pre(shlex.join(summary["command_line"]))
    corpus = summary["corpus"]
    page.paragraph(
        f"Text: {corpus['source']}, {corpus['files']} files, {corpus['train_bytes']:,} bytes to train on and "
        f"{corpus['held_out_bytes']:,} held out" + (", cut at the size limit." if corpus["truncated"] else ".")
    )
    page.table(("", ""), [("sha256 of the text", code(corpus["sha256"]))])
    page.heading("Settings")
    config = dict(summary["config"])
    model = config.pop("model")
    if config["max_grad_norm"] is None:
        config["max_grad_norm"] = "none"
    rows = [(name, _value(value)) for name, value in {**model, **config}.items()]
    half = (len(rows) + 1) // 2
    right = [*rows[half:], ("", "")][:half]
    page.table(("setting", "value", "setting", "value"), [(*a, *b) for a, b in zip(rows[:half], right, strict=True)])
    page.heading("Machine and versions")
    facts = {**summary["machine"], "torch_threads": summary["torch_threads"], **summary["versions"]}
    page.table(("", ""), [(name, _value(value)) for name, value in facts.items()])


def _value(value: Any) -> Cell:
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return "default" if value is None else str(value)

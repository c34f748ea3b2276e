"""Compares runs: what their folders say, where their settings differ, whether they ended on the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from superoffload.tools.report.page import Cell, Page, code, mark
from superoffload.tools.report.recorded_runs import Run
from superoffload.tools.train.run_digests import STATE_PARTS


def figures(run: Run) -> dict[str, Any]:
    """Returns what the table and the JSON show of a run, with None for unknown values."""
    summary, seconds = run.summary, run.column("seconds")
    exposed = math.fsum(run.column("optimizer_seconds_exposed"))
    busy = math.fsum(run.column("optimizer_seconds"))
    loss = summary["loss"] if summary else {}
    return {
        "name": run.name,
        "ended": summary is not None,
        "passed": bool(summary and summary["passed"]),
        "parameters": summary["parameters"] if summary else None,
        "steps": len(run.steps),
        "train_loss_last": run.steps[-1]["loss"],
        "held_out_loss_after": loss.get("held_out_after"),
        "tokens_per_second": math.fsum(run.column("tokens")) / math.fsum(seconds),
        "step_seconds_median": median(seconds),
        "optimizer_seconds_hidden": max(0.0, busy - exposed),
        "optimizer_seconds_exposed": exposed,
        "exposed_share": exposed / math.fsum(seconds),
        "clip_rate": run.stat("clip_rate"),
        "skipped_steps": run.stat("skipped_steps"),
        "journal_bytes_per_param": run.stat("journal_bytes_per_param"),
        "pinned_bytes": run.stat("pinned_bytes"),
        "peak_host_memory_bytes": summary.get("peak_host_memory_bytes") if summary else None,
        "digests": dict(summary["digests"]) if summary else None,
    }


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Returns settings, by name, that are not the same in all runs that ended."""
    known = [run.settings for run in runs]
    names = dict.fromkeys(name for settings in known for name in settings)
    columns = {name: [settings.get(name) for settings in known] for name in names}
    return {name: values for name, values in columns.items() if any(value != values[0] for value in values)}


def comparison_page(runs: Sequence[Run], plot: Path | None, hint: str) -> str:
    page = Page(
        "Runs compared" if len(runs) > 1 else "One run",
        ", ".join(run.name for run in runs),
    )
    _add_cards(page, runs)
    if plot is not None:
        page.image(plot, "loss, throughput, exposed optimizer time and memory of all runs")
    else:
        page.paragraph(hint)
    page.heading("Figures")
    rows = _figure_rows([figures(run) for run in runs])
    page.table(("", *(run.name for run in runs)), rows, numeric_from=1)
    _add_settings(page, runs)
    _add_digests(page, runs)
    page.heading("Where they come from")
    page.table(("run", "command"), [(run.name, _command(run)) for run in runs])
    return page.html()


def _add_cards(page: Page, runs: Sequence[Run]) -> None:
    if len(runs) < 2:
        return
    all_figures = [figures(run) for run in runs]
    fastest = max(all_figures, key=lambda values: float(values["tokens_per_second"]))
    hidden = min(all_figures, key=lambda values: float(values["exposed_share"]))
    cards = [
        (f"{fastest['tokens_per_second']:,.0f}", f"tokens per second, the most: {fastest['name']}"),
        (f"{hidden['exposed_share']:.0%}", f"of the step exposed, the least: {hidden['name']}"),
    ]
    learnt = [values for values in all_figures if values["held_out_loss_after"] is not None]
    if learnt:
        best = min(learnt, key=lambda values: float(values["held_out_loss_after"]))
        cards.append((f"{best['held_out_loss_after']:.3f}", f"held-out loss, the lowest: {best['name']}"))
    page.cards(cards)


_ROWS = (
    ("parameters", "parameters", "{:,}"),
    ("steps", "steps", "{:,}"),
    ("training loss at the end", "train_loss_last", "{:.3f}"),
    ("held-out loss at the end", "held_out_loss_after", "{:.3f}"),
    ("tokens per second", "tokens_per_second", "{:,.0f}"),
    ("seconds per step, median", "step_seconds_median", "{:.4f}"),
    ("optimizer seconds hidden", "optimizer_seconds_hidden", "{:.2f}"),
    ("optimizer seconds exposed", "optimizer_seconds_exposed", "{:.2f}"),
    ("of the step exposed", "exposed_share", "{:.1%}"),
    ("of the steps clipped", "clip_rate", "{:.1%}"),
    ("steps skipped", "skipped_steps", "{:,}"),
    ("journal bytes per parameter", "journal_bytes_per_param", "{:.2f}"),
    ("host memory pinned, MiB", "pinned_bytes", "{:,.0f}"),
    ("host memory at its peak, MiB", "peak_host_memory_bytes", "{:,.0f}"),
)


def _figure_rows(columns: Sequence[Mapping[str, Any]]) -> list[Sequence[Cell]]:
    rows: list[Sequence[Cell]] = [("ended", *("yes" if values["ended"] else "no" for values in columns))]
    rows.append(
        ("passed", *(mark(values["passed"], "yes", "no") if values["ended"] else "" for values in columns)),
    )
    for title, name, form in _ROWS:
        scale = 2**-20 if "MiB" in title else 1
        cells = ["" if values[name] is None else form.format(values[name] * scale) for values in columns]
        rows.append((title, *cells))
    return rows


def _add_settings(page: Page, runs: Sequence[Run]) -> None:
    if len(runs) < 2:
        return
    page.heading("Settings that differ")
    differing = different_settings(runs)
    if differing:
        rows = [(name, *(str(value) for value in values)) for name, values in differing.items()]
        page.table(("setting", *(run.name for run in runs)), rows)
    else:
        page.paragraph("None: the runs had the same settings.")


def _add_digests(page: Page, runs: Sequence[Run]) -> None:
    """Adds the final digests: equal digests mean equal bits."""
    ended = [run for run in runs if run.summary is not None]
    if len(ended) < 2:
        return
    page.heading("State at the end, SHA-256")
    rows: list[Sequence[Cell]] = []
    for part in STATE_PARTS:
        digests = [run.summary["digests"][part] for run in ended if run.summary]
        same = len(set(digests)) == 1
        rows.append((part, *(code(digest[:12]) for digest in digests), mark(same, "equal", "different")))
    page.table(("", *(run.name for run in ended), ""), rows)


def _command(run: Run) -> Cell:
    return code(" ".join(run.summary["command_line"])) if run.summary else "the run did not end"

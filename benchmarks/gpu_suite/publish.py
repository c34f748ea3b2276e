"""Publishes results to benchmarks/results/: rows made with this checkout's sources, under its commit.

Rows that the file has from earlier commits stay as they are, each under its own, until they are measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import style
from benchmarks.gpu_suite.contestants import CONTESTANTS
from benchmarks.gpu_suite.jobs import plain
from benchmarks.gpu_suite.table import table
from benchmarks.gpu_suite.targets import all_targets
from benchmarks.report import commit, digest_of, write_results
from superoffload.errors import ArgumentError


def report(path: Path, target: Path | None, picture: Path | None = None) -> int:
    try:
        found = plain(json.loads(path.read_text(encoding="utf-8")))
        rows = list(found["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"report={path}: expected results of this suite ({type(error).__name__}: {error})"
        ) from error
    if picture is not None:
        plot([row for row in rows if row["commit"] == found["commit"]], picture)
    made_here = [row for row in rows if digest_of(tuple(row.get("made_from", ()))) == row.get("sources")]
    print(table(made_here, all_targets(made_here)))
    stale = [row["key"] for row in rows if row not in made_here]
    if stale:
        print(f"\n{len(stale)} of {len(rows)} rows were made with other sources than this checkout's and are left out:")
        print("\n".join(f"  {key}" for key in stale))
    if target is not None:
        _write(target, found, made_here)
    return 0


def _write(target: Path, found: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    head = commit()
    if head.endswith("+changes") or head == "unknown":
        raise ArgumentError(
            f"json={target}: results are published under a commit, and this checkout is {head}; commit first"
        )
    targets = [each.as_json() for each in all_targets(rows)]
    new = [{**row, "commit": head} for row in rows]
    for row in new:
        if "output" in row:  # the log has all of it
            row["output"] = row["output"].strip().rpartition("\n")[2]
    measured = {row["key"] for row in new}
    before = json.loads(target.read_text(encoding="utf-8"))["rows"] if target.exists() else []
    kept = [row for row in before if row["key"] not in measured]
    # The last call's command and what it left say nothing of rows from several calls and machines.
    facts = {name: value for name, value in found.items() if name not in ("command", "slot", "left")}
    write_results(target, plain({**facts, "commit": head, "targets": targets, "rows": [*new, *kept]}))
    print(f"{target}: {len(new)} rows, commit {head}; {len(kept)} of earlier commits")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the milliseconds of a step: forward and backward, and what is exposed. For rows of one machine."""
    trained = [row for row in rows if row["settings"].get("what") == "train" and row["settings"]["capped_gib"] is None]
    shown = [row for row in trained if "seconds_median" in (row.get("result") or {})]
    if not shown:
        raise ArgumentError(f"plot={path}: the report has no training row that was measured")
    tokens = sorted({row["settings"]["tokens"] for row in shown})
    with style.drawing(path, 9.5, 0.27 * len(shown) + 1.6) as figure:
        heights = [sum(row["settings"]["tokens"] == count for row in shown) for count in tokens]
        panels = figure.subplots(len(tokens), 1, height_ratios=heights, squeeze=False)[:, 0]
        for axes, count in zip(panels, tokens, strict=True):
            here = [row for row in shown if row["settings"]["tokens"] == count]
            here.sort(key=lambda row: row["result"]["seconds_median"])
            names = [row["settings"]["contestant"] for row in here]
            kinds = {"ours": style.BLUE, "bound": style.GREEN, "peer": style.ORANGE}
            colours = [kinds[CONTESTANTS[name].kind] for name in names]
            bars = axes.barh(names, [1e3 * row["result"]["seconds_median"] for row in here], color=colours, alpha=0.55)
            axes.barh(names, [1e3 * row["result"]["bare_seconds"] for row in here], color=colours)
            axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_title(f"{count:,} tokens per step; milliseconds, dark: forward and backward alone")

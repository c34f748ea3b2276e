"""Summary, plot and text of `superoffload verify --ranks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from superoffload.convergence.setup import Setup
from superoffload.convergence.suite import Result
from superoffload.reporting import style
from superoffload.reporting.page import Page
from superoffload.reporting.plots import PLOT_HINT, matplotlib_installed, smooth
from superoffload.reporting.run_folder import RunFolder, naming_write_errors
from superoffload.reporting.summary import add_plot, common_summary, json_stats
from superoffload.training.record import finite_or_none

_COLOURS = (style.MUTED, style.BLUE, style.ORANGE, style.GREEN, style.RED)


def ranks_summary(
    result: Result, setup: Setup, engine: str, ranks: int, seconds: float, command_line: Sequence[str]
) -> dict[str, Any]:
    tolerance = result.tolerance
    return {
        **common_summary("verify", command_line, result.problems, seconds, 1),
        "engine": engine,
        "ranks": ranks,
        "setup": dataclasses.asdict(setup),
        "steps": setup.steps,
        "digests_compared": result.compared_digests,
        "tolerance": tolerance.describe() if tolerance else {},
        "loss_at_the_end": {
            name: finite_or_none(curve.losses[-1]) if curve.losses else None for name, curve in result.curves.items()
        },
        "stats": json_stats(result.curves["speculative"].stats),
    }


def finish_ranks(folder: RunFolder, summary: dict[str, Any], result: Result) -> str:
    """Writes summary, plot and page; returns the result as text."""
    folder.write_summary(summary)
    if matplotlib_installed():
        title = f"{summary['engine']}, {summary['ranks']} ranks"
        with naming_write_errors(folder.plot_path):
            plot_curves({f"{title}: {name}": curve.losses for name, curve in result.curves.items()}, folder.plot_path)
    folder.write_report(_page(folder, summary).html())
    lines = [f"  {name:<26} loss {loss:.4f}" for name, loss in summary["loss_at_the_end"].items() if loss is not None]
    if summary["passed"]:
        lines.append(
            f"verified: {summary['ranks']} ranks with {summary['engine']}, {summary['steps']} steps: speculative "
            f"equals synchronous in {summary['digests_compared']} digests per run, and both stay within "
            f"{summary['tolerance']['loss_at_the_end']:.4f} of one process, in {summary['seconds']:.1f} s"
        )
    lines += [f"FAILED: {problem}" for problem in summary["problems"]]
    lines.append(f"report: {folder.report_path}")
    return "\n".join(lines)


def plot_curves(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Loss over steps, smoothed, and the distance of every curve from the first one."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(style.MATPLOTLIB):
        figure = Figure(figsize=(9.5, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
        first = next(iter(curves.values()))
        for index, (name, losses) in enumerate(curves.items()):
            steps = range(1, len(losses) + 1)
            dashes = (0, (4 + index, index)) if index else "-"
            colour = _COLOURS[index % len(_COLOURS)]
            above.plot(steps, smooth(losses), color=colour, linestyle=dashes, linewidth=1.5, label=name)
            difference = [abs(a - b) for a, b in zip(losses, first, strict=False)]
            if index:
                below.plot(steps[: len(difference)], difference, color=colour, linewidth=0.9)
        above.set_title("Loss (nats per byte), smoothed")
        above.legend(loc="upper right", fontsize=7.5)
        below.set_title("Distance from the first curve, each step")
        below.set_xlabel("step")
        figure.savefig(path)


def _page(folder: RunFolder, summary: dict[str, Any]) -> Page:
    page = Page(
        f"{summary['ranks']} ranks converge as one process" if summary["passed"] else "Verification failed",
        f"{summary['engine']} on {summary['ranks']} ranks, {summary['steps']} steps of a small language model",
    )
    if summary["passed"]:
        page.verdict(True, "Verified.")
    else:
        page.verdict(False, "Not verified.", summary["problems"])
    add_plot(page, folder, "loss of all runs over the steps", PLOT_HINT)
    page.heading("What is checked")
    page.listing(
        [
            "On every rank, the speculative and the synchronous run have the same losses and the same SHA-256 of "
            "masters, moments and published parameters, with clips, a NaN and an infinity that only one rank has.",
            "Loss and gradient norm of every step, and the weights at the end, stay within a tolerance of the "
            "one-process run: three times what six one-process runs that add up in different orders differ among "
            "themselves.",
            "With fsdp2, the same holds for plain FSDP2 with torch.optim.AdamW on fp32 parameters.",
        ]
    )
    page.table(("run", "loss at the end"), [(n, f"{v:.4f}") for n, v in summary["loss_at_the_end"].items() if v])
    page.table(("tolerance", ""), [(name, f"{value:.3g}") for name, value in summary["tolerance"].items()])
    return page

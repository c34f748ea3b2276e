"""Writes summary, plot and text of `superoffload verify --ranks`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from superoffload.tools.report.page import Page
from superoffload.tools.report.run_folder import RunFolder
from superoffload.tools.report.summary import add_plot, common_summary, json_stats

from benchmarks import style
from benchmarks.plots import PLOT_HINT, matplotlib_installed, smooth
from benchmarks.training.record import finite_or_none
from superoffload.host.untrusted import printable
from superoffload.tools.convergence.compare import Tolerance
from superoffload.tools.convergence.convergence_setup import Setup
from superoffload.tools.convergence.suite import Result
from superoffload.tools.output import naming_write_errors

_COLOURS = (style.BLUE, style.ORANGE, style.GREEN, style.RED)
_REFERENCE: dict[str, Any] = {"color": style.INK, "linewidth": 1.2, "linestyle": (0, (1, 1.5)), "zorder": 4}


def ranks_summary(
    result: Result, setup: Setup, engine: str, ranks: int, hosts: int, seconds: float, command_line: Sequence[str]
) -> dict[str, Any]:
    tolerance = result.tolerance
    return {
        **common_summary("verify", command_line, result.problems, seconds, 1),
        "passed": result.verified,
        "inconclusive": result.inconclusive,
        "engine": engine,
        "ranks": ranks,
        "hosts": hosts,
        "setup": dataclasses.asdict(setup),
        "steps": setup.steps,
        "digests_compared": result.compared_digests,
        "reference": tolerance.of if tolerance else None,
        "tolerance": tolerance.describe() if tolerance else {},
        "loss_at_the_end": {
            name: finite_or_none(curve.losses[-1]) if curve.losses else None for name, curve in result.curves.items()
        },
        "stats": json_stats(result.curves["speculative"].stats),
    }


def finish_ranks(folder: RunFolder, summary: dict[str, Any], result: Result) -> str:
    """Writes summary, plot and page; returns the result as text."""
    folder.write_summary(summary)
    if matplotlib_installed() and result.tolerance is not None:
        title = f"{summary['engine']}, {_ranks(summary)}"
        with naming_write_errors(folder.plot_path):
            curves = {name: curve.losses for name, curve in result.curves.items()}
            plot_curves(curves, result.tolerance, folder.plot_path, title)
    folder.write_report(_page(folder, summary).html())
    lines = [f"  {name:<26} loss {loss:.4f}" for name, loss in summary["loss_at_the_end"].items() if loss is not None]
    if summary["passed"]:
        tolerance = summary["tolerance"]["loss_at_the_end"]
        lines.append(
            f"verified: {_ranks(summary)} with {summary['engine']}, {summary['steps']} steps: speculative "
            f"equals synchronous in {summary['digests_compared']} digests per run, and the losses of both differ from "
            f"{summary['reference']} by less than the tolerance, {tolerance:.4f}, in {summary['seconds']:.1f} s"
        )
    lines += [f"FAILED: {problem}" for problem in summary["problems"]]
    if summary["inconclusive"]:
        lines.append(f"INCONCLUSIVE: {summary['inconclusive']}")
    lines.append(f"report: {printable(str(folder.report_path))}")
    return "\n".join(lines)


def _ranks(summary: Mapping[str, Any]) -> str:
    on_hosts = f" on {summary['hosts']} hosts" if summary["hosts"] > 1 else ""
    return f"{summary['ranks']} ranks{on_hosts}"


def plot_curves(curves: Mapping[str, Sequence[float]], tolerance: Tolerance, path: Path, title: str = "") -> None:
    """Plots smoothed losses, and each curve's distance from the reference's runs with the allowed distance.

    Names are that of the reference or end in speculative, synchronous or "plain ..."; the part before is the group.
    """
    with style.drawing(path, 9.5, 6.6) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        groups: dict[str, str] = {}
        for name, losses in curves.items():
            steps = range(1, len(losses) + 1)
            looks = _REFERENCE if name == tolerance.of else _looks(name, groups)
            above.plot(steps, smooth(losses, 9), label=name, **looks)
            distance = [abs(loss - centre) for loss, centre in zip(losses, tolerance.losses, strict=False)]
            below.plot(steps[: len(distance)], distance, **{**looks, "linewidth": 0.6 * looks["linewidth"]})
        allowed = tolerance.allowed_losses()
        below.plot(range(1, len(allowed) + 1), allowed, color=style.INK, linewidth=0.9)
        below.fill_between(range(1, len(allowed) + 1), allowed, color=style.GRID, zorder=0)
        above.set_title("Loss (nats per byte), running median" + (f": {title}" if title else ""))
        above.legend(loc="upper right")
        below.set_title(f"Distance from the mean of six runs of {tolerance.of} in every step; grey: what is allowed")
        below.set_yscale("log")
        below.set_ylim(bottom=1e-5)
        below.set_xlabel("step")


def _looks(name: str, groups: dict[str, str]) -> dict[str, Any]:
    """Returns a colour per group; the synchronous line is wide and pale, as an equal speculative run covers it."""
    group, _, kind = name.rpartition("ranks, ")
    colour = groups.setdefault(group, _COLOURS[len(groups) % len(_COLOURS)])
    if kind.startswith("plain"):
        return {"color": colour, "linewidth": 1.1, "linestyle": (0, (5, 2)), "zorder": 2}
    if kind == "synchronous":
        return {"color": colour, "linewidth": 5.0, "alpha": 0.3, "zorder": 1}
    return {"color": colour, "linewidth": 1.4, "zorder": 3}


def _page(folder: RunFolder, summary: dict[str, Any]) -> Page:
    reference, inconclusive = summary["reference"], summary["inconclusive"]
    converged = f"{_ranks(summary)} converge as {reference}"
    page = Page(
        converged if summary["passed"] else "Nothing differs" if inconclusive else "Verification failed",
        f"{summary['engine']} on {_ranks(summary)}, {summary['steps']} steps of a small language model",
    )
    if summary["passed"]:
        page.verdict(True, "Verified.")
    else:
        page.verdict(False, "Not verified.", [*summary["problems"], *filter(None, [inconclusive])])
    add_plot(page, folder, "loss of all runs over the steps", PLOT_HINT)
    page.heading("What is checked")
    page.listing(
        [
            "On every rank, the speculative and the synchronous run have the same losses and the same SHA-256 of "
            "masters, moments and published parameters, with clips, a NaN and an infinity that only one rank has.",
            "Loss and gradient norm of every step, and the weights at the end, stay within a tolerance of the "
            f"reference, {reference}: three times what six of its runs that add up in different orders differ among "
            "themselves.",
            "With titan, the reference is torchtitan's Trainer with its own AdamW on the same ranks. It leaves out the "
            "steps with a NaN or an infinity, where that AdamW would write NaN into the parameters.",
            "With fsdp2, plain FSDP2 with torch.optim.AdamW on fp32 parameters stays within it too.",
            "With fsdp2, tp, pp, ep and titan, delivery on demand has the same losses and SHA-256 as eager delivery.",
        ]
    )
    page.table(("run", "loss at the end"), [(n, f"{v:.4f}") for n, v in summary["loss_at_the_end"].items() if v])
    page.table(("tolerance", ""), [(name, f"{value:.3g}") for name, value in summary["tolerance"].items()])
    return page

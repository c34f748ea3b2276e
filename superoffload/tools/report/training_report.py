"""Writes summary, plot and page of `superoffload train`."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from typing import Any

from superoffload.host.untrusted import printable
from superoffload.tools.report.page import Page, code
from superoffload.tools.report.plots import PLOT_HINT, matplotlib_installed, plot_training
from superoffload.tools.report.run_folder import RunFolder, naming_write_errors
from superoffload.tools.report.summary import (
    add_fates,
    add_plot,
    add_reproduction,
    common_summary,
    json_stats,
)
from superoffload.tools.report.timeline_plot import plot_timeline
from superoffload.tools.train.corpus import Corpus
from superoffload.tools.train.record import StepRecord, finite_or_none
from superoffload.tools.train.run_digests import STATE_PARTS
from superoffload.tools.train.trainer import Trainer


def training_summary(
    trainer: Trainer,
    corpus: Corpus,
    records: Sequence[StepRecord],
    held_out_before: float,
    seconds: float,
    threads: int,
    command_line: Sequence[str],
    problems: Sequence[str],
) -> dict[str, Any]:
    stats = trainer.optimizer.stats()
    training_seconds = math.fsum(record.seconds for record in records)
    return {
        **common_summary("train", command_line, problems, seconds, threads),
        "config": trainer.config.describe(),
        "parameters": trainer.model.parameter_count(),
        "compute": str(trainer.compute).removeprefix("torch."),
        "corpus": corpus.describe(),
        "loss": {
            "held_out_before": finite_or_none(held_out_before),
            "held_out_after": finite_or_none(records[-1].held_out_loss),
            "train_first": finite_or_none(records[0].loss),
            "train_last": finite_or_none(records[-1].loss),
        },
        "steps": len(records),
        "tokens_per_second": round(sum(record.tokens for record in records) / training_seconds, 1),
        "optimizer_seconds_hidden": math.fsum(record.hidden_seconds for record in records),
        "optimizer_seconds_exposed": math.fsum(record.exposed_seconds for record in records),
        "peak_host_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "stats": json_stats(stats),
        "digests": trainer.optimizer.state_digests(),
    }


def finish_training(
    folder: RunFolder, summary: dict[str, Any], records: Sequence[StepRecord], trace: str | None = None
) -> str:
    """Writes summary, plot and page; returns the result as text for the terminal."""
    folder.write_summary(summary)
    if matplotlib_installed():
        before, threshold = summary["loss"]["held_out_before"], summary["config"]["max_grad_norm"]
        with naming_write_errors(folder.plot_path):
            plot_training(records, before, threshold, folder.plot_path)
        if trace is not None:
            with naming_write_errors(folder.timeline_path):
                plot_timeline(trace, folder.timeline_path)
    folder.write_report(_page(folder, summary, trace).html())
    return _text(folder, summary)


def _text(folder: RunFolder, summary: dict[str, Any]) -> str:
    loss, stats = summary["loss"], summary["stats"]
    hidden, exposed = summary["optimizer_seconds_hidden"], summary["optimizer_seconds_exposed"]
    lines = [
        f"trained {summary['steps']} steps in {summary['seconds']:.1f} s, {summary['tokens_per_second']:,.0f} tokens/s",
        f"held-out loss {_number(loss['held_out_before'])} -> {_number(loss['held_out_after'])} nats per byte",
        f"optimizer {hidden:.2f} s hidden behind backward, {exposed:.2f} s exposed; "
        f"clipped {stats['clip_rate']:.1%} of steps, skipped {stats['skipped_steps']}",
    ]
    if not folder.plot_path.exists():
        lines.append(PLOT_HINT)
    lines += [f"FAILED: {problem}" for problem in summary["problems"]]
    lines.append(f"report: {printable(str(folder.report_path))}")
    return "\n".join(lines)


def _page(folder: RunFolder, summary: dict[str, Any], trace: str | None) -> Page:
    config, loss, stats = summary["config"], summary["loss"], summary["stats"]
    page = Page(
        "Training with superoffload",
        f"{summary['parameters']:,} {config['dtype']} parameters, fp32 masters and moments in host memory, "
        f"{summary['steps']} steps of {config['tokens_per_step']:,} bytes",
    )
    if summary["passed"]:
        page.verdict(True, "Passed: the held-out loss fell, and every loss, parameter and moment is finite.")
    else:
        page.verdict(False, "Failed.", summary["problems"])
    hidden, exposed = summary["optimizer_seconds_hidden"], summary["optimizer_seconds_exposed"]
    page.cards(
        [
            (f"{_short(loss['held_out_before'])} → {_short(loss['held_out_after'])}", "held-out loss, nats per byte"),
            (f"{summary['tokens_per_second']:,.0f}", "bytes per second"),
            (f"{hidden / max(hidden + exposed, 1e-9):.0%}", "of optimizer time hidden"),
            (f"{stats['clip_rate']:.0%}", "of steps clipped"),
            (f"{summary['seconds']:.0f} s", "training time"),
        ]
    )
    add_plot(page, folder, "loss, gradient norm and optimizer time over the run", PLOT_HINT)
    if folder.timeline_path.exists():
        page.heading("Where the time of a few steps went")
        page.image(folder.timeline_path, "lanes of compute, packing, processors, delivery and verdict over time")
        page.paragraph(f"All steps are in {trace}; open it in ui.perfetto.dev.")
    page.heading("What is checked")
    page.listing(
        [
            "The mean loss on held-out text, which the model never saw, is lower after training than before.",
            "The loss of every step is a finite number.",
            "Every element of the parameters, masters, exp_avg and exp_avg_sq is finite at the end.",
        ]
    )
    page.paragraph(
        "That speculation changed nothing is not checked here: superoffload verify trains twice and compares every bit."
    )
    add_fates(page, stats)
    page.paragraph(
        f"Besides, {stats['buckets_stepped']} buckets were stepped after the verdict, in one pass, and "
        f"{stats['buckets_two_phase']} in two phases; {stats['skipped_steps']} steps were skipped."
    )
    page.heading("State at the end, SHA-256")
    page.table(("", ""), [(part, code(summary["digests"][part])) for part in STATE_PARTS])
    add_reproduction(page, summary)
    return page


def _short(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "?"


def _number(value: float | None) -> str:
    return f"{value:.3f}" if value is not None else "not finite"

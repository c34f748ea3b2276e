"""Writes summary, plot and page of `superoffload verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superoffload.host.untrusted import printable
from superoffload.tools.report.page import Cell, Markup, Page, cell_html, code, mark
from superoffload.tools.report.plots import PLOT_HINT, matplotlib_installed, plot_verification
from superoffload.tools.report.run_folder import RunFolder, naming_write_errors
from superoffload.tools.report.summary import (
    add_fates,
    add_plot,
    add_reproduction,
    common_summary,
    fate_lines,
    json_stats,
)
from superoffload.tools.train.corpus import Corpus
from superoffload.tools.train.injection import Injection
from superoffload.tools.train.run_digests import STATE_PARTS
from superoffload.tools.train.training_config import TrainingConfig
from superoffload.tools.train.verification import Verification


def verification_summary(
    result: Verification,
    config: TrainingConfig,
    corpus: Corpus,
    injection: Injection,
    default_events: bool,
    seconds: float,
    threads: int,
    command_line: Sequence[str],
) -> dict[str, Any]:
    steps = range(1, config.steps + 1)
    return {
        **common_summary("verify", command_line, result.problems, seconds, threads),
        "passed": result.verified,
        "inconclusive": result.inconclusive,
        "config": {**config.describe(), "speculation": "always and never"},
        "corpus": corpus.describe(),
        "default_events": default_events,
        "events": {str(step): list(injection.at(step).texts) for step in steps if injection.at(step).texts},
        "steps": len(result.steps),
        "digests_compared": result.compared_digests,
        "stats": json_stats(result.speculative_stats),
        "stats_synchronous": json_stats(result.synchronous_stats),
        "digests": [
            {"step": step.step, "equal": not step.difference, **vars(step.speculative_digests)} for step in result.steps
        ],
    }


def finish_verification(folder: RunFolder, summary: dict[str, Any], result: Verification) -> str:
    """Writes summary, plot and page; returns the result as text for the terminal."""
    folder.write_summary(summary)
    if matplotlib_installed() and result.steps:
        with naming_write_errors(folder.plot_path):
            plot_verification(result.steps, folder.plot_path)
    folder.write_report(_page(folder, summary, result).html())
    return _text(folder, summary, result)


def _text(folder: RunFolder, summary: dict[str, Any], result: Verification) -> str:
    lines = ["buckets of the speculative run", *fate_lines(result.speculative_stats)]
    if not folder.plot_path.exists():
        lines.append(PLOT_HINT)
    if result.verified:
        lines.append(
            f"verified: {summary['steps']} steps, {summary['digests_compared']} digests of gradients, "
            f"{', '.join(STATE_PARTS)}, all equal, in {summary['seconds']:.1f} s"
        )
    lines += [f"FAILED: {problem}" for problem in summary["problems"]]
    if result.inconclusive:
        lines.append(f"INCONCLUSIVE: {result.inconclusive}")
    lines.append(f"report: {printable(str(folder.report_path))}")
    return "\n".join(lines)


def _page(folder: RunFolder, summary: dict[str, Any], result: Verification) -> Page:
    stats = summary["stats"]
    page = Page(
        "Verification failed" if result.problems else "Speculation changed nothing",
        "The same training twice from the same seeds, once speculative and once synchronous, compared bit for bit",
    )
    if result.verified:
        page.verdict(True, f"Verified: all {summary['digests_compared']} digests are equal.")
    else:
        page.verdict(False, "Not verified.", [*result.problems, *filter(None, [result.inconclusive])])
    page.cards(
        [
            (str(summary["steps"]), "steps compared"),
            (str(sum(map(len, summary["events"].values()))), "events injected"),
            (str(stats["buckets_speculated"]), "buckets speculated"),
            (str(stats["buckets_speculated"] - stats["buckets_committed"]), "of them taken back"),
            (f"{summary['seconds']:.0f} s", "for both runs"),
        ]
    )
    add_plot(page, folder, "loss, bucket fates and digest comparison over the run", PLOT_HINT)
    _add_checks(page, summary["default_events"])
    add_fates(page, stats)
    _add_steps(page, result)
    add_reproduction(page, summary)
    return page


def _add_checks(page: Page, default_events: bool) -> None:
    page.heading("What is checked")
    page.listing(
        [
            "Just before every step(): the SHA-256 of all gradients is the same in both runs. Only then can the "
            "optimizer be judged by what comes out.",
            "After every step: the SHA-256 of all masters, of exp_avg, of exp_avg_sq and of the published parameters "
            "is the same in both runs.",
            "A step with a NaN or Inf gradient, or with an exception before step(), left every one of these as it was.",
            "Every speculated bucket has exactly one fate, and the synchronous run speculated none.",
            "Every fate occurred."
            if default_events
            else "Not checked, since these are not the default events: every fate occurred.",
        ]
    )
    page.paragraph("Torch ran with deterministic algorithms and a fixed number of threads.")


def _add_steps(page: Page, result: Verification) -> None:
    page.heading("Step by step")
    rows: list[Sequence[Cell]] = []
    for step in result.steps:
        record = step.speculative
        digests: list[Cell] = [
            _digest_cell(getattr(step.speculative_digests, part), getattr(step.synchronous_digests, part))
            for part in ("gradients", *STATE_PARTS)
        ]
        events = Markup("<br>".join(f'<span class="event">{cell_html(text)}</span>' for text in record.events))
        rows.append((step.step, events, f"{record.loss:.3f}", *digests))
    page.table(("step", "events", "loss", "gradients", *STATE_PARTS), rows)
    page.paragraph("The first eight digits of each digest; metrics.jsonl has all of both runs.")


def _digest_cell(ours: str, theirs: str) -> Markup:
    if ours == theirs:
        return Markup(f"{code(ours[:8]).html} {mark(True, '=', '').html}")
    return Markup(f"{code(ours[:8]).html} {mark(False, '', '≠').html} {code(theirs[:8]).html}")
